"""Densities, entropies and samples against torch.distributions."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Beta

from penstock.nav import networks


def parameters(seed: int = 0, rows: int = 200) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    alpha = 1 + torch.rand(rows, 3, generator=g, dtype=torch.float64).mul(4).sub(1).exp()
    beta = 1 + torch.rand(rows, 3, generator=g, dtype=torch.float64).mul(4).sub(1).exp()
    action = torch.rand(rows, 3, generator=g, dtype=torch.float64).clamp(1e-4, 1 - 1e-4)
    return alpha.requires_grad_(), beta.requires_grad_(), action


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_values_and_gradients_are_those_of_torch(weights: tuple[float, float]) -> None:
    alpha, beta, action = parameters()
    log_prob, entropy = networks.log_prob_and_entropy(alpha, beta, action)
    expected = Beta(alpha, beta)
    torch.testing.assert_close(log_prob, expected.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, expected.entropy().sum(-1))
    spread = torch.linspace(-1, 1, len(alpha), dtype=torch.float64)
    ours = (spread * (weights[0] * log_prob + weights[1] * entropy)).sum()
    theirs = weights[0] * expected.log_prob(action).sum(-1) + weights[1] * expected.entropy().sum(
        -1
    )
    got = torch.autograd.grad(ours, (alpha, beta))
    want = torch.autograd.grad((spread * theirs).sum(), (alpha, beta))
    torch.testing.assert_close(got, want)


def test_float32_is_close_enough() -> None:
    alpha, beta, action = parameters(1)
    exact = networks.log_prob_and_entropy(alpha, beta, action)
    rough = networks.log_prob_and_entropy(alpha.float(), beta.float(), action.float())
    for got, want in zip(rough, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


def test_the_density_without_gradients_is_the_same() -> None:
    alpha, beta, action = parameters(2)
    log_prob = networks.beta_log_prob(alpha, beta, action)
    assert not log_prob.requires_grad
    torch.testing.assert_close(log_prob, networks.log_prob_and_entropy(alpha, beta, action)[0])


def test_samples_have_the_moments_and_keep_off_the_edges() -> None:
    alpha = torch.tensor([1.0001, 2.0, 50.0]).expand(40_000, 3)
    beta = torch.tensor([1.0001, 7.0, 5.0]).expand(40_000, 3)
    drawn = networks.sample_beta(alpha, beta, torch.Generator().manual_seed(3))
    expected = Beta(alpha[0], beta[0])
    assert drawn.min() >= networks.EDGE
    assert drawn.max() < 1.0
    torch.testing.assert_close(drawn.mean(0), expected.mean, rtol=0, atol=0.006)
    torch.testing.assert_close(drawn.var(0), expected.variance, rtol=0.05, atol=0)


def test_samples_come_from_the_generator_alone() -> None:
    alpha, beta, _ = parameters(4)
    before = torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    first = networks.sample_beta(alpha, beta, generator)
    second = networks.sample_beta(alpha, beta, generator)
    generator.set_state(state)
    assert torch.equal(networks.sample_beta(alpha, beta, generator), first)
    assert not torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)
