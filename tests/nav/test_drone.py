"""How drones answer to commands."""

import numpy as np
import pytest
import torch

from penstock.nav.simulation.kernels import (
    AXIS,
    POSITION,
    QUATERNION,
    ROW,
    VELOCITY,
    fly_fast,
    fly_hummingbird,
    start,
)

from .reference import HEADING, THROTTLE, fly, rotation

DRONES = ["hummingbird", "fast"]
CALM = (0.0, 0.0, 0.0)


def at_rest(targets):
    places = np.zeros((2, len(targets), 3), np.float32)
    places[0, :, 2] = 2.0
    places[1] = targets
    rows = np.zeros((len(targets), ROW), np.float32)
    start(np.arange(len(targets)), places, rows)
    return torch.from_numpy(rows)


@pytest.mark.parametrize("drone", DRONES)
def test_hover_stays_where_it_is(drone):
    rows = at_rest([(10, 0, 2), (-3, 7, 2)])
    fly(rows, torch.zeros(2, 3), 300, drone)
    torch.testing.assert_close(rows[:, POSITION], at_rest([(1, 0, 2)] * 2)[:, POSITION])
    assert float(rows[:, VELOCITY].abs().max()) < 1e-4


@pytest.mark.parametrize("drone", DRONES)
@pytest.mark.parametrize("wish", [(2.0, 0.0, 0.0), (-1.0, 1.5, 0.0), (0.5, -0.5, 1.0)])
def test_a_command_is_followed_in_half_a_second(drone, wish):
    rows = at_rest([(3, 4, 2)])
    command = torch.tensor([wish])
    fly(rows, command, 28, drone)  # 0.45 s, one time constant
    share = float((rows[0, VELOCITY] * command[0]).sum() / (command * command).sum())
    assert 0.35 < share < 0.75
    fly(rows, command, 160, drone)
    torch.testing.assert_close(rows[:, VELOCITY], command, atol=0.03, rtol=0)


def test_the_two_drones_are_alike():
    paths = []
    for drone in DRONES:
        rows = at_rest([(3, 4, 2)])
        points = []
        for wish in [(2.0, 0.0, 0.0), (0.0, 2.0, 0.5), (-2.0, 0.0, -0.5)]:
            for _ in range(10):
                fly(rows, torch.tensor([wish]), 6, drone)
                points.append(rows[0, POSITION].clone())
        paths.append(torch.stack(points))
    assert float((paths[0] - paths[1]).norm(dim=1).max()) < 0.25


def test_yaw_is_nearly_held_and_the_attitude_stays_a_rotation():
    rows = at_rest([(3, 4, 2), (-5, 1, 2), (-4, -4, 1)])
    before = rows[:, HEADING].clone()
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        fly(rows, 4 * torch.rand(3, 3, generator=generator) - 2, 6, "hummingbird")
    # The controller asks for the yaw it has, so that what wild commands add is not taken back.
    torch.testing.assert_close(rows[:, HEADING], before, atol=0.2, rtol=0)
    body = rotation(rows[:, QUATERNION])
    eye = torch.eye(3).expand(3, 3, 3)
    torch.testing.assert_close(body @ body.transpose(1, 2), eye, atol=1e-5, rtol=0)
    assert float(rows[:, THROTTLE].min()) >= 0
    assert float(rows[:, THROTTLE].max()) <= 1


def test_yaw_can_be_held():
    rows = at_rest([(3, 4, 2)])
    angle = torch.tensor(0.3)
    rows[:, QUATERNION] = torch.stack([angle.cos(), 0 * angle, 0 * angle, angle.sin()])
    fly(rows, torch.zeros(1, 3), 1, "hummingbird")
    away = float((rows[0, HEADING] - rows[0, AXIS]).norm())
    assert away > 0.3
    twin = rows.clone()
    fly(rows, torch.zeros(1, 3), 250, "hummingbird", hold_yaw=True)
    fly(twin, torch.zeros(1, 3), 250, "hummingbird")
    assert float((rows[0, HEADING] - rows[0, AXIS]).norm()) < 0.1 * away
    assert float((twin[0, HEADING] - twin[0, AXIS]).norm()) > 0.9 * away


def test_a_fresh_drone_faces_its_target():
    targets = [(10, 0, 2), (-10, 0, 2), (0, 5, 2), (0, -5, 2), (-3, -4, 1), (-3, 4, 1)]
    rows = at_rest(targets)
    ahead = rotation(rows[:, QUATERNION])[:, :2, 0]
    torch.testing.assert_close(ahead, rows[:, HEADING], atol=1e-5, rtol=0)
    way = torch.tensor(targets)[:, :2].float()
    torch.testing.assert_close(ahead, way / way.norm(dim=1, keepdim=True), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("drone", "hold"), [("hummingbird", False), ("hummingbird", True), ("fast", False)]
)
def test_compiled_code_flies_the_same(drone, hold):
    generator = torch.Generator().manual_seed(3)
    rows = at_rest([(3, 4, 2)] * 20)
    # From any attitude, fast rotations included: the states that flights seldom visit.
    rows[:, QUATERNION] = torch.nn.functional.normalize(torch.randn(20, 4, generator=generator))
    rows[:, 13:16] = torch.randn(20, 3, generator=generator)
    rows[:, THROTTLE] = torch.rand(20, 4, generator=generator)
    rows[:, VELOCITY] = torch.randn(20, 3, generator=generator)
    for _ in range(25):
        wish = 4 * torch.rand(20, 3, generator=generator) - 2
        mine = rows.clone().numpy()
        for n in range(20):
            if drone == "fast":
                fly_fast(mine[n], tuple(map(float, wish[n])), 3, 1.0, CALM)
            else:
                fly_hummingbird(mine[n], tuple(map(float, wish[n])), 3, 1.0, CALM, hold)
        fly(rows, wish, 3, drone, hold)
        np.testing.assert_allclose(mine, rows.numpy(), atol=2e-4)
