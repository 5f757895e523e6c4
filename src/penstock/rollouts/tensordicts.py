"""TensorDict, for those who have it: rollouts of nested dicts do without.

Versions of 2023 lack some of these classes. Nothing is an instance of what is not there, and making
one says what to install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.extras import installed
from penstock.errors import MissingExtra

if TYPE_CHECKING:
    from tensordict import MemoryMappedTensor as MemoryMappedTensor
    from tensordict import NonTensorData as NonTensorData
    from tensordict import NonTensorStack as NonTensorStack
    from tensordict import TensorDict as TensorDict
    from tensordict import TensorDictBase as TensorDictBase
    from tensordict import is_tensor_collection as is_tensor_collection
    from tensordict import is_tensorclass as is_tensorclass
else:
    try:
        import tensordict
    except ImportError:
        tensordict = None

    class _Absent:
        def __init__(self, *_: Any, **__: Any) -> None:
            old = f"this rollout needs a newer tensordict than {installed('tensordict')}"
            raise MissingExtra("tensordict", "rl", old if tensordict else None)

        @classmethod
        def from_list(cls, _: Any) -> Any:
            """Stand for that of a NonTensorStack."""
            return cls()

    def _is_none(value: Any) -> bool:
        return False

    MemoryMappedTensor = getattr(tensordict, "MemoryMappedTensor", _Absent)
    NonTensorData = getattr(tensordict, "NonTensorData", _Absent)
    NonTensorStack = getattr(tensordict, "NonTensorStack", _Absent)
    TensorDict = getattr(tensordict, "TensorDict", _Absent)
    TensorDictBase = getattr(tensordict, "TensorDictBase", _Absent)
    is_tensor_collection = getattr(tensordict, "is_tensor_collection", _is_none)
    is_tensorclass = getattr(tensordict, "is_tensorclass", _is_none)
