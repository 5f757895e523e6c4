"""The hooks that run a barrier before an optimizer's step or a `load_state_dict`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class BarrierHook:
    """Calls a method that may be gone by then. Copies of it (in a deep-copied module) do nothing.

    Args:
        barrier: The method; only weakly referred to.
    """

    def __init__(self, barrier: Callable[[], None] | None = None) -> None:
        self._barrier = weakref.WeakMethod(barrier) if barrier is not None else None

    def __call__(self, *_: Any, **__: Any) -> None:
        """Run the barrier; return None, as step hooks must."""
        barrier = self._barrier() if self._barrier is not None else None
        if barrier is not None:
            barrier()

    def __deepcopy__(self, memo: dict[int, Any]) -> BarrierHook:
        return BarrierHook()

    def __reduce__(self) -> Any:
        return (BarrierHook, ())


def install(
    barrier: Callable[[], None],
    optimizers: Iterable[torch.optim.Optimizer],
    modules: Iterable[torch.nn.Module],
) -> list[Any]:
    """Hook a barrier in before everything that changes these; return the handles to remove."""
    hook = BarrierHook(barrier)
    handles: list[Any] = []
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(hook))
        handles.append(optimizer.register_load_state_dict_pre_hook(hook))
    for module in modules:
        # Every submodule has a load_state_dict of its own.
        for part in module.modules():
            handles.append(part.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
    return handles
