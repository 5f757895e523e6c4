"""The shield: both back ends alike, and both against scenes whose answer is plain."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import UsageError
from penstock.nav.shield import Shield, ShieldSettings
from penstock.nav.shield.shield import beams, candidates, response

Scene = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other, at every one of thousands of calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def free(count: int = 1) -> Scene:
    return {
        "lidar": torch.zeros(count, 1, 36, 4),
        "dynamic_obstacle": torch.zeros(count, 5, 10),
    }


def obstacle(place: list[float], motion: list[float], *, width: float = 0.5, tall: bool = True):
    """One row of dynamic_obstacle as the simulator observes it."""
    where = torch.tensor(place)
    if tall:
        where[2] = 0.0
    flat = where[:2].norm()[None]
    kind = torch.tensor([width / 0.25 - 1, 0.0 if tall else 1.0])
    return torch.cat((where / where.norm(), flat, where[2:], torch.tensor(motion), kind))


def crowd(count: int, seed: int) -> tuple[Tensor, Scene, Tensor, Tensor]:
    """Drones among many obstacles: most velocities collide somewhere."""
    g = torch.Generator().manual_seed(seed)
    obs = free(count)
    hits = torch.rand(count, 1, 36, 4, generator=g) < 0.15
    obs["lidar"] = hits * torch.rand(count, 1, 36, 4, generator=g) * 3.6
    for n in range(count):
        for k in range(int(torch.randint(0, 6, (1,), generator=g))):
            place = (torch.rand(3, generator=g) * 6 - 3).tolist()
            motion = (torch.rand(3, generator=g) * 3 - 1.5).tolist()
            width = 0.25 * int(torch.randint(1, 5, (1,), generator=g))
            obs["dynamic_obstacle"][n, k] = obstacle(
                place, motion, width=width, tall=bool(torch.rand(1, generator=g) < 0.5)
            )
    wanted = torch.rand(count, 3, generator=g) * 4 - 2
    current = torch.rand(count, 3, generator=g) * 4 - 2
    return wanted, obs, current, torch.rand(count, generator=g) * 3.8 + 0.2


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), known=st.booleans(), margin=st.sampled_from([0.0, 0.1, 0.4]))
def test_the_back_ends_agree(seed: int, known: bool, margin: float) -> None:
    wanted, obs, current, height = crowd(24, seed)
    results = [
        Shield((margin, margin / 2), backend).filter(
            wanted, obs, current, height if known else None
        )
        for backend in ("numba", "numpy")
    ]
    (fast, fast_changed), (slow, slow_changed) = results
    assert torch.equal(fast_changed, slow_changed)
    assert torch.equal(fast, slow)


def test_the_crowd_is_worth_testing() -> None:
    wanted, obs, current, _ = crowd(200, 0)
    _, changed = Shield().filter(wanted, obs, current)
    assert 40 < int(changed.sum()) < 180


@pytest.fixture(params=["numba", "numpy"])
def shield(request: pytest.FixtureRequest) -> Shield:
    return Shield(backend=request.param)


FORWARD = torch.tensor([[2.0, 0.0, 0.0]])


def test_a_free_way_is_not_touched(shield: Shield) -> None:
    wanted = torch.tensor([[1.7, 0.3, -0.2], [0.0, 0.0, 0.0]])
    result, changed = shield.filter(wanted, free(2), FORWARD.expand(2, 3))
    assert torch.equal(result, wanted)
    assert not changed.any()
    assert (shield.decisions, shield.interventions) == (2, 0)


def test_a_wall_ahead_is_not_flown_into(shield: Shield) -> None:
    obs = free()
    for i in range(-4, 5):  # 1 m ahead
        obs["lidar"][0, 0, i] = 4 - 1.0 / math.cos(math.radians(10 * i))
    result, changed = shield.filter(FORWARD, obs, torch.zeros(1, 3))
    assert changed.tolist() == [True]
    assert result[0, 0] < 0.6  # neither through it nor below it
    away, changed = shield.filter(-FORWARD, obs, torch.zeros(1, 3))
    assert not changed.any()
    assert torch.equal(away, -FORWARD)
    assert (shield.decisions, shield.interventions) == (2, 1)


def test_what_is_out_of_range_is_no_hit(shield: Shield) -> None:
    obs = free()
    obs["lidar"][0, 0, 0] = -0.05  # of a sensor that sees farther, and was not cut
    assert not shield.filter(FORWARD, obs, torch.tensor([[8.0, 0.0, 0.0]]))[1].any()


def test_one_steps_aside_for_a_cylinder_coming(shield: Shield) -> None:
    obs = free()
    obs["dynamic_obstacle"][0, 3] = obstacle([2.0, 0.0, 1.0], [-1.0, 0.0, 0.0])
    assert shield.filter(FORWARD, obs, torch.zeros(1, 3))[1].all()
    obs["dynamic_obstacle"][0, 3] = obstacle([2.0, 0.0, 1.0], [2.5, 0.0, 0.0])
    assert not shield.filter(FORWARD, obs, torch.zeros(1, 3))[1].any()  # it flees
    obs["dynamic_obstacle"][0, 3] = obstacle([0.6, 2.2, 1.0], [0.0, -1.5, 0.0])
    _, changed = shield.filter(FORWARD * 0.4, obs, torch.zeros(1, 3))
    assert changed.all()  # it crosses from the side, where nothing is now


def test_a_box_is_flown_under_but_a_cylinder_is_not(shield: Shield) -> None:
    obs = free()
    obs["dynamic_obstacle"][0, 0] = obstacle([1.5, 0.0, 1.2], [0.0, 0.0, 0.0], tall=False)
    assert not shield.filter(FORWARD, obs, torch.zeros(1, 3))[1].any()
    obs["dynamic_obstacle"][0, 0] = obstacle([1.5, 0.0, 0.8], [0.0, 0.0, 0.0], tall=False)
    assert shield.filter(FORWARD, obs, torch.zeros(1, 3))[1].all()
    obs["dynamic_obstacle"][0, 0] = obstacle([1.5, 0.0, 1.2], [0.0, 0.0, 0.0], tall=True)
    assert shield.filter(FORWARD, obs, torch.zeros(1, 3))[1].all()


def test_the_ground_and_the_ceiling_count_if_the_height_is_known(shield: Shield) -> None:
    down = torch.tensor([[1.0, 0.0, -1.5]])
    assert not shield.filter(down, free(), torch.zeros(1, 3))[1].any()
    result, changed = shield.filter(down, free(), torch.zeros(1, 3), torch.tensor([0.8]))
    assert changed.all()
    assert result[0, 2] > -1.0
    assert shield.filter(-down, free(), torch.zeros(1, 3), torch.tensor([3.5]))[1].all()


def test_the_response_is_the_integral_of_the_velocity() -> None:
    config = ShieldSettings()
    shares = response(config)
    assert len(shares) == 11
    place = velocity = 0.0
    wanted, start, dt = 2.0, -1.0, 1e-4
    velocity = start
    for _ in range(16_500):
        velocity += dt / config.response_s * (wanted - velocity)
        place += dt * velocity
    assert shares[-1] @ [wanted, start] == pytest.approx(place, abs=1e-3)


def test_the_tables() -> None:
    table = candidates(2.0)
    assert table.shape == (97, 3)
    assert len({tuple(row.round(9)) for row in table}) == 97
    assert abs(table).max() == pytest.approx(2.0)
    rays = beams(36, (-10.0, 0.0, 10.0, 20.0))
    assert rays[1].tolist() == pytest.approx([1, 0, 0])  # straight ahead, level
    assert rays[4 * 9 + 1].tolist() == pytest.approx([0, 1, 0])  # counter-clockwise
    assert rays[3, 2] == pytest.approx(math.sin(math.radians(20)))


def test_it_counts_on_and_takes_no_drones(shield: Shield) -> None:
    shield.decisions, shield.interventions = 5, 2
    result, changed = shield.filter(torch.zeros(0, 3), free(0), torch.zeros(0, 3))
    assert result.shape == (0, 3)
    assert changed.shape == (0,)
    assert (shield.decisions, shield.interventions) == (5, 2)


def test_bad_input() -> None:
    with pytest.raises(UsageError, match=r"no shield back end 'nunba'; did you mean 'numba'\?"):
        Shield(backend="nunba")
    with pytest.raises(UsageError, match="static_margin_m is -1; give metres, 0 or more"):
        Shield((0.1, -1))
    with pytest.raises(UsageError, match=r"shield: current has shape \[2, 3\]; give \[1, 3\]"):
        Shield().filter(FORWARD, free(), torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"shield: lidar has shape \[2, 144\]; give \[1, 144\]"):
        Shield().filter(FORWARD, free(2), torch.zeros(1, 3))


def test_a_drone_too_near_flies_away(shield: Shield) -> None:
    """Every velocity collides at the first step: then the one that comes out of it soonest."""
    obs = free()
    obs["lidar"][0, 0, 0] = 4 - 0.32
    result, changed = shield.filter(FORWARD, obs, torch.zeros(1, 3))
    assert changed.all()
    assert result[0, 0] < -0.5
    obs = free()
    obs["dynamic_obstacle"][0, 0] = obstacle([0.0, 0.5, 0.0], [0.0, -1.0, 0.0])
    result, changed = shield.filter(FORWARD * 0.1, obs, torch.zeros(1, 3))
    assert changed.all()
    assert result[0, 1] < -0.5
