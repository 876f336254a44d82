"""The original parameters of sharded modules, which other code may still hold.

use of an original parameter                   after `fully_shard`
---------------------------------------------  -----------------------------------------------------------------
it is in a module that is sharded later        it is tied: its unit registers the sharded parameter there, too
an optimizer from before reads its gradient,   RuntimeError: the optimizer would silently train nothing
in `step()` or `zero_grad()`
an in-place write                              RuntimeError: it would not reach the model
its values, shape, attributes are read         they are unchanged
"""

import functools
import re
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from weft.fsdp.autograd import behind_classes
from weft.fsdp.parameter import record_of

_WRITES = re.compile(
    r".*[^_]_|__set__|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


def retire(original: nn.Parameter) -> None:
    """Turn `original`, which a sharded parameter with the same record has replaced, into an `Original`."""
    original.__class__ = _retired(type(original))


@functools.cache
def _retired(kind: type) -> type:
    return type(f"Original{kind.__name__}", (Original, kind), {"__slots__": ()})


class Original:
    """A parameter that a sharded one has replaced: writes and reading `.grad` raise RuntimeError."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with behind_classes():
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute == "grad" or _WRITES.fullmatch(func.__name__):
                held = next((each for each in tree_leaves((args[:1], kwargs)) if isinstance(each, Original)), None)
                if held is not None:
                    raise RuntimeError(_replaced(held))
            return func(*args, **(kwargs or {}))


def _replaced(original: Any) -> str:
    record = record_of(original)
    name = "a parameter" if record is None else f"parameter {record}"
    return (
        f"{name} is a parameter from before fully_shard, which replaced it by a sharded one: an optimizer step or a "
        f"write on the old one never reaches the model. Build the optimizer after fully_shard, from "
        f"model.parameters(), and get the parameters from their modules again"
    )
