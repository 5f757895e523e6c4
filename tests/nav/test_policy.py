"""The networks: shapes, what they ignore, and that nothing depends on the global generator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import UsageError
from penstock.nav.networks import (
    PRESETS,
    FoldedConvolutions,
    Policy,
    _Pool,
    describe_obstacles,
    has_bf16,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads wait for each other, at every one of thousands of calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def observe(count: int = 16, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "state": torch.randn(count, 8, generator=g),
        "lidar": torch.rand(count, 1, 36, 4, generator=g) * 4,
        "direction": torch.randn(count, 1, 3, generator=g),
        "dynamic_obstacle": torch.randn(count, 5, 10, generator=g),
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_shapes_and_ranges(preset: str) -> None:
    policy = Policy(preset, seed=1)
    alpha, beta, value = policy(observe())
    assert alpha.shape == beta.shape == (16, 3)
    assert value.shape == (16,)
    assert min(alpha.min(), beta.min()) > 1.0
    act = policy.act(observe(), torch.Generator().manual_seed(0))
    assert act.action.shape == (16, 3)
    assert act.log_prob.shape == act.value.shape == (16,)
    assert not any(x.requires_grad for x in act)
    expected = torch.distributions.Beta(alpha, beta).log_prob(act.action).sum(-1)
    torch.testing.assert_close(act.log_prob, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policy.value(observe()), value)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_mean_action(preset: str) -> None:
    policy = Policy(preset, seed=1)
    alpha, beta, _ = policy(observe())
    action = policy.act(observe()).action
    torch.testing.assert_close(action, alpha / (alpha + beta))
    assert torch.equal(action, policy.act(observe()).action)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_seed_alone_makes_the_weights(preset: str) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = Policy(preset, seed=7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    same, other = Policy(preset, seed=7).state_dict(), Policy(preset, seed=8).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    policy = Policy(preset, seed=8)
    policy.load_state_dict(one)
    assert torch.equal(policy(observe())[0], Policy(preset, seed=7)(observe())[0])


def test_the_groups_are_all_parameters_once() -> None:
    for preset in PRESETS:
        policy = Policy(preset)
        grouped = [id(p) for _, parameters in policy.groups() for p in parameters]
        assert sorted(grouped) == sorted(map(id, policy.parameters()))


def test_folded_convolutions_are_the_convolutions() -> None:
    folded = FoldedConvolutions()
    lidar = observe(9)["lidar"]

    def plain(x: Tensor) -> Tensor:
        for layer in (folded.first, folded.second, folded.third):
            x = F.elu(layer(x))
        return x.flatten(1)

    torch.testing.assert_close(folded(lidar[:, 0]), plain(lidar))
    spread = torch.linspace(-1, 1, 9 * 288).view(9, 288)
    got = torch.autograd.grad((folded(lidar[:, 0]) * spread).sum(), list(folded.parameters()))
    want = torch.autograd.grad((plain(lidar) * spread).sum(), list(folded.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_navrl_has_the_size_of_navrl() -> None:
    counts = {name: sum(p.numel() for p in ps) for name, ps in Policy("navrl").groups()}
    lidar = 64 + 16 * 4 * 15 + 16 + 16 * 16 * 15 + 16 + 288 * 128 + 128 + 256
    dynamic = 50 * 128 + 128 + 256 + 128 * 64 + 64 + 128
    trunk = 200 * 256 + 256 * 256 + 4 * 256 + 2 * 256
    assert counts["features"] == lidar + dynamic + trunk
    assert counts["actor"] == 2 * (256 * 3 + 3)
    assert counts["critic"] == 257


def test_the_fast_policy_does_not_care_for_the_order_of_obstacles() -> None:
    policy, obs = Policy("fast", seed=3), observe()
    turned = dict(obs, dynamic_obstacle=obs["dynamic_obstacle"][:, [3, 1, 4, 0, 2]])
    torch.testing.assert_close(policy(obs)[0], policy(turned)[0])
    changed = dict(obs, dynamic_obstacle=obs["dynamic_obstacle"] * 0.5)
    assert not torch.allclose(policy(obs)[0], policy(changed)[0], atol=1e-6)


def test_unseen_obstacles_do_not_move_with_the_drone() -> None:
    policy, obs = Policy("fast", seed=3), observe()
    obs["dynamic_obstacle"] = torch.zeros(16, 5, 10)
    _, seen = describe_obstacles(obs["dynamic_obstacle"], obs["state"])
    assert not seen.any()
    features = []
    policy.encoder.trunk.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    policy(obs)
    assert not features[0][:, 73:].any()


def test_obstacles_are_described_relative_to_the_drone() -> None:
    state = torch.tensor([[1, 0, 0, 9, 0, 1.0, 0.5, 0.0]])
    place = torch.tensor([1.0, -2.0, 0.5])
    row = torch.cat(
        (
            place / place.norm(),
            place[:2].norm()[None],
            place[2:],
            torch.tensor([-0.5, 0.5, 0.25, 3.0, 1.0]),
        )
    )
    obstacles = torch.zeros(1, 5, 10)
    obstacles[0, 2] = row
    rows, seen = describe_obstacles(obstacles, state)
    assert seen[0, :, 0].tolist() == [0, 0, 1, 0, 0]
    torch.testing.assert_close(rows[0, 2, :3] * 4, place)
    torch.testing.assert_close(rows[0, 2, 3:6] / 0.4, torch.tensor([-1.5, 0.0, 0.25]))
    assert rows[0, 2, 9:].tolist() == [1.0, 1.0]


def test_bf16_can_be_chosen() -> None:
    assert Policy("fast").bf16 == has_bf16()
    obs = observe(64)
    exact, rough = Policy("fast", seed=1, bf16=False), Policy("fast", seed=1, bf16=True)
    want, got = exact(obs), rough(obs)
    assert all(x.dtype == torch.float32 for x in got)
    assert not torch.equal(want[0], got[0])
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


def test_an_unknown_preset_gets_a_hint() -> None:
    with pytest.raises(UsageError, match=r"no policy preset 'fats'; did you mean 'fast'\?"):
        Policy("fats")


def test_the_pool_of_several_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    there = torch.arange(0, 35, 2)  # of 5 obstacles of 7 drones
    found = torch.randn(18, 3, generator=generator, dtype=torch.double, requires_grad=True)
    every = torch.zeros(35, 3, dtype=torch.double).index_copy(0, there, found).view(5, 7, 3)
    most, mean = _Pool.apply(found, there, 7)
    assert torch.equal(most, every.amax(0))
    assert torch.equal(mean, every.mean(0))
    assert torch.autograd.gradcheck(lambda given: _Pool.apply(given, there, 7), (found,))
