"""The Beta distribution of actions: densities, entropies and samples, made for speed.

The gamma functions are the whole cost, so each is evaluated once per update, for both results and
all their gradients together; automatic differentiation would evaluate digamma twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EDGE = 1e-6
"""Samples keep this distance from 0 and 1, where densities end."""


def sample(alpha: Tensor, beta: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw from Beta(alpha, beta), reproducibly: the same generator state gives the same bits.

    Two Gamma draws in one call; `torch.distributions` would draw the same way, but only from the
    global generator. The draw is serial on the CPU, so the number of threads does not matter.

    Args:
        alpha: First parameters, at least 1.
        beta: Second parameters, of the same shape.
        generator: Where the randomness comes from, on the device of the parameters.
    """
    with torch.no_grad():
        both = torch._standard_gamma(torch.stack((alpha, beta)), generator=generator)
        return both[0].div_(both[0] + both[1]).clamp_(EDGE, 1.0 - EDGE)


def log_prob(alpha: Tensor, beta: Tensor, action: Tensor) -> Tensor:
    """Log density of independent Betas, summed over the last axis; without gradients."""
    with torch.no_grad():
        upper, lower, total = torch.lgamma(torch.stack((alpha, beta, alpha + beta)))
        inside = (alpha - 1.0) * action.log() + (beta - 1.0) * torch.log1p(-action)
        density: Tensor = (inside + total - upper - lower).sum(-1)
        return density


def log_prob_and_entropy(alpha: Tensor, beta: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log density of `action` and entropy, both summed over the last axis, differentiable.

    Args:
        alpha: First parameters, [..., actions].
        beta: Second parameters, of the same shape.
        action: Values inside (0, 1); no gradient flows to them.

    Returns:
        Log density and entropy, [...] each.
    """
    result: tuple[Tensor, Tensor] = _LogProbAndEntropy.apply(alpha, beta, action)  # type: ignore[no-untyped-call]
    return result


class _LogProbAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, alpha: Tensor, beta: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.stack((alpha, beta, alpha + beta))
        gamma_a, gamma_b, gamma_s = torch.lgamma(stacked)
        psi_a, psi_b, psi_s = torch.digamma(stacked)
        log_action, log_rest = action.log(), torch.log1p(-action)
        norm = gamma_s - gamma_a - gamma_b
        above_a, above_b = alpha - 1.0, beta - 1.0
        log_prob = above_a * log_action + above_b * log_rest + norm
        entropy = (above_a + above_b) * psi_s - norm - above_a * psi_a - above_b * psi_b
        if any(ctx.needs_input_grad[:2]):
            tri_a, tri_b, tri_s = torch.polygamma(1, stacked)
            shared = (above_a + above_b) * tri_s
            ctx.save_for_backward(
                log_action + psi_s - psi_a,
                log_rest + psi_s - psi_b,
                shared - above_a * tri_a,
                shared - above_b * tri_b,
            )
        return log_prob.sum(-1), entropy.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        density_a, density_b, entropy_a, entropy_b = ctx.saved_tensors
        density, entropy = grads[0].unsqueeze(-1), grads[1].unsqueeze(-1)
        return (
            density * density_a + entropy * entropy_a,
            density * density_b + entropy * entropy_b,
            None,
        )
