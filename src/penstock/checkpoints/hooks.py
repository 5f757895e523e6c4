"""The hooks that run a barrier before an optimizer's step or a `load_state_dict`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Hook:
    """Calls a method that may be gone by then. Copies of it (in a deep-copied module) do nothing.

    Args:
        method: Only weakly referred to.
    """

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else None

    def __call__(self, *_: Any, **__: Any) -> None:
        """Call the method; return None, as step hooks must."""
        method = self._method() if self._method is not None else None
        if method is not None:
            method()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return (Hook, ())


def install(
    barrier: Callable[[], None],
    forget: Callable[[], None],
    optimizers: Iterable[torch.optim.Optimizer],
    modules: Iterable[torch.nn.Module],
) -> list[Any]:
    """Hook a barrier in before everything that changes these; return the handles to remove.

    `forget` is called after an optimizer has loaded a state, and so has other tensors.
    """
    hook, loaded = Hook(barrier), Hook(forget)
    handles: list[Any] = []
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(hook))
        handles.append(optimizer.register_load_state_dict_pre_hook(hook))
        handles.append(optimizer.register_load_state_dict_post_hook(loaded))
    for module in modules:
        # Every submodule has a load_state_dict of its own.
        for part in module.modules():
            handles.append(part.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
    return handles
