"""Returns brought to mean 0 and deviation 1 for the critic, by running averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.errors import UsageError

AllReduce = Callable[[Tensor], None]
"""Replaces a tensor, in place, by its mean over all processes."""


class ValueNorm:
    """Running mean and deviation of the returns, without the bias of a start from zero.

    Args:
        beta: Share of the past kept at each update.
        floor: Least variance, so that constant returns are not blown up.
        device: Where the statistics live.
    """

    def __init__(
        self, beta: float = 0.995, floor: float = 1e-2, device: torch.device | str = "cpu"
    ) -> None:
        if not 0.0 <= beta < 1.0:
            raise UsageError(f"value norm: beta is {beta}; give a number from 0 to below 1")
        self.beta = beta
        self.floor = floor
        # Mean, mean square, weight of all updates so far. Double, since variance is a difference.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    @property
    def mean_and_deviation(self) -> tuple[float, float]:
        """What values are shifted and scaled by; (0, 1) before the first update."""
        mean, square, weight = self._sums.tolist()
        if weight == 0.0:
            return 0.0, 1.0
        mean, square = mean / weight, square / weight
        return mean, float(max(square - mean * mean, self.floor) ** 0.5)

    def update(self, returns: Tensor, all_reduce: AllReduce | None = None) -> None:
        """Take in a batch of returns, with those of the other processes if there are any."""
        wide = returns.detach().double()
        batch = torch.stack((wide.mean(), wide.square().mean(), wide.new_ones(())))
        if all_reduce is not None:
            all_reduce(batch)
        self._sums.mul_(self.beta).add_(batch, alpha=1.0 - self.beta)

    def normalize(self, values: Tensor) -> Tensor:
        """Bring returns to the scale of the critic."""
        mean, deviation = self.mean_and_deviation
        return (values - mean) / deviation

    def denormalize(self, values: Tensor) -> Tensor:
        """Bring values of the critic to the scale of returns."""
        mean, deviation = self.mean_and_deviation
        return values * deviation + mean

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that changes, copied."""
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`.

        Raises:
            UsageError: The state is not one of a value norm.
        """
        sums = state.get("sums")
        if sums is None or sums.shape != self._sums.shape:
            raise UsageError("value norm: the state has no 'sums' of three; give one that it saved")
        self._sums.copy_(sums)
