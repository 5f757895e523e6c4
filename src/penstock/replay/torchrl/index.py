"""Which slots an index means, what data may be written there, and who asks."""

from __future__ import annotations

from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from penstock.errors import UsageError

Slots = NDArray[np.int64]

# Within TorchRL, these read or write single columns of `storage[...]`, and nothing else of it.
_COLUMN_MODULES = ("torchrl.data.replay_buffers.samplers", "torchrl.data.replay_buffers.her")
_COLUMN_METHODS = ("set_at_", "set_", "update_")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def key_path(index: Any) -> tuple[str, ...] | None:
    """Return the path of a key, if an index is one: a string, or strings in a tuple."""
    if isinstance(index, str):
        return (index,)
    if isinstance(index, tuple) and index and all(isinstance(part, str) for part in index):
        return index
    return None


def slots_at(dims: tuple[int, ...], index: Any) -> Slots:
    """Return the slots that an index of any kind means, in the shape of the answer.

    A TensorDict of slot numbers says so itself: what it takes, and how, is thus the same for keys
    that are compressed and for those that are not.
    """
    if isinstance(index, torch.Tensor):
        index = index.cpu()
    elif isinstance(index, tuple):
        index = tuple(part.cpu() if isinstance(part, torch.Tensor) else part for part in index)
    numbers = torch.arange(int(np.prod(dims))).reshape(dims)
    slots: torch.Tensor = TensorDict({"slot": numbers}, batch_size=dims)[index]["slot"]
    return np.ascontiguousarray(slots.numpy()).reshape(slots.shape)


def place(
    cursor: Any, data: TensorDictBase, ndim: int, max_size: int, dims: tuple[int, ...]
) -> tuple[Slots, Any, TensorDictBase]:
    """Work out where data goes.

    Args:
        cursor: One place along the first dimension, or several; or any index.
        data: What goes there.
        ndim: Leading dimensions that count as slots.
        max_size: Slots that were asked for.
        dims: The slots per dimension; () before the first write, when the data decides.

    Returns:
        The slots, in the shape in which the data covers them; the cursor and the data, without what
        would be overwritten at once because a place is named again later.

    Raises:
        UsageError: The data does not fit there.
    """
    single = isinstance(cursor, int | np.integer)
    if isinstance(cursor, range | list | np.ndarray):
        cursor = torch.as_tensor(np.asarray(cursor))
    rest = tuple(data.batch_size[1 - single : ndim - single])
    dims = dims or (-(-max_size // max(1, int(np.prod(rest)))), *rest)
    if isinstance(cursor, torch.Tensor) and cursor.dtype in _INTEGERS and cursor.ndim == 1:
        cursor = torch.where(cursor < 0, cursor + dims[0], cursor).long()
        kept = _last_of_each(cursor.cpu().numpy())
        if kept is not None and len(data) == len(cursor):
            cursor, data = cursor[kept], data[torch.from_numpy(kept)]
        rows = cursor.cpu().numpy()
    elif single:
        rows = np.asarray(cursor + dims[0] if cursor < 0 else cursor, np.int64)
    else:
        return _place_anywhere(cursor, data, dims)
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= dims[0]):
        bad = rows.min() if rows.min() < 0 else rows.max()
        raise UsageError(f"slot {int(bad)} is not one of {dims[0]}")
    expected = (*rows.shape, *dims[1:])
    if tuple(data.batch_size[: len(expected)]) != expected:
        raise UsageError(
            f"data of batch size {list(data.batch_size)} does not fill {list(expected)} slots "
            f"(ndim={ndim}); give one item per slot"
        )
    inner = np.arange(int(np.prod(dims[1:])), dtype=np.int64).reshape(dims[1:])
    as_outer = (..., *[None] * inner.ndim)
    slots = np.asarray(rows[as_outer] * inner.size + inner)
    return slots, cursor, data


def _place_anywhere(
    index: Any, data: TensorDictBase, dims: tuple[int, ...]
) -> tuple[Slots, Any, TensorDictBase]:
    slots = slots_at(dims, index)
    if np.unique(slots).size != slots.size:
        raise UsageError("an index names a slot twice; which value should it get?")
    if tuple(data.batch_size[: slots.ndim]) != slots.shape:
        raise UsageError(
            f"data of batch size {list(data.batch_size)} does not fill {list(slots.shape)} slots"
        )
    return slots, index, data


def _last_of_each(rows: Slots) -> Slots | None:
    """Return which items to keep when places are named twice: the last ones; None for all."""
    found, at = np.unique(rows[::-1], return_index=True)
    if found.size == rows.size:
        return None
    kept: Slots = np.sort(rows.size - 1 - at)
    return kept


def is_view(index: Any) -> bool:
    """Tell whether torch gives a view for an index: numbers, slices, an ellipsis, None."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is ... or isinstance(part, int | np.integer | slice) for part in parts
    )


def reads_columns(frame: FrameType) -> bool:
    """Tell whether a caller is a part of TorchRL that looks only at small columns."""
    module = frame.f_globals.get("__name__", "")
    if module.startswith(_COLUMN_MODULES):
        return True
    inside: bool = module.startswith("torchrl.data.replay_buffers.replay_buffers")
    return inside and frame.f_code.co_name in _COLUMN_METHODS
