"""Advantages against a loop over single environments, and the scale of values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.nav.ppo import ValueNorm, gae


def slow_gae(reward, value, terminated, truncated, final, last, gamma, lam):
    """One environment, as in the books: split into episodes, sum the discounted errors."""
    steps = len(reward)
    result = [0.0] * steps
    for start in range(steps):
        weight = 1.0
        for t in range(start, steps):
            following = value[t + 1] if t + 1 < steps else last
            if truncated[t]:
                following = final[t]
            if terminated[t]:
                following = 0.0
            result[start] += weight * (reward[t] + gamma * following - value[t])
            if terminated[t] or truncated[t]:
                break
            weight *= gamma * lam
    return result


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 12),
    environments=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_equals_the_loop(steps, environments, seed, share, gamma, lam) -> None:
    g = torch.Generator().manual_seed(seed)
    shape = (steps, environments)
    reward, value, final = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    terminated, truncated = (torch.rand(shape, generator=g) < share for _ in range(2))
    last = torch.randn(environments, generator=g, dtype=torch.float64)
    copies = [x.clone() for x in (reward, value, final, last)]
    advantage, returns = gae(
        reward, value, terminated, truncated, final, last, gamma=gamma, lam=lam
    )
    for n in range(environments):
        columns = [x[:, n].tolist() for x in (reward, value, terminated, truncated, final)]
        expected = slow_gae(*columns, last[n].item(), gamma, lam)
        torch.testing.assert_close(advantage[:, n], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(returns, advantage + value)
    for was, now in zip(copies, (reward, value, final, last), strict=True):
        assert torch.equal(was, now)  # the rollout may be saved later


def test_a_wrong_shape_is_named() -> None:
    x = torch.zeros(4, 3)
    with pytest.raises(UsageError, match=r"gae: last_value has shape \[4\].* give \[3\]"):
        gae(x, x, x.bool(), x.bool(), x, torch.zeros(4), gamma=0.9, lam=0.9)


def test_value_norm_is_not_biased_towards_its_start() -> None:
    norm = ValueNorm()
    values = torch.tensor([3.0, 5.0, 7.0, 9.0])
    assert norm.mean_and_deviation == (0.0, 1.0)
    assert torch.equal(norm.denormalize(values), values)
    norm.update(values)
    mean, deviation = norm.mean_and_deviation
    assert mean == pytest.approx(6.0)
    assert deviation == pytest.approx(5.0**0.5)
    torch.testing.assert_close(norm.denormalize(norm.normalize(values)), values)
    assert norm.normalize(values).mean().abs() < 1e-6


def test_value_norm_forgets_and_has_a_floor() -> None:
    norm = ValueNorm(beta=0.5)
    norm.update(torch.full((8,), 100.0))
    for _ in range(40):
        norm.update(torch.full((8,), 2.0))
    mean, deviation = norm.mean_and_deviation
    assert mean == pytest.approx(2.0, abs=1e-6)
    assert deviation == pytest.approx(0.1)


def test_value_norm_continues_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(0)
    batches = [torch.randn(64, generator=g) * 5 + 2 for _ in range(4)]
    whole, half = ValueNorm(), ValueNorm()
    for batch in batches:
        whole.update(batch)
    for batch in batches[:2]:
        half.update(batch)
    other = ValueNorm()
    other.load_state_dict(half.state_dict())
    for batch in batches[2:]:
        other.update(batch)
    assert other.mean_and_deviation == whole.mean_and_deviation
    with pytest.raises(UsageError, match="no 'sums'"):
        other.load_state_dict({})
    with pytest.raises(UsageError, match="beta is 1"):
        ValueNorm(beta=1.0)
