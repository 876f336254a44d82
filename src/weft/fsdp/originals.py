"""The parameters that modules had before they were sharded, which other code may still hold.

what is done with one                          after `fully_shard`
---------------------------------------------  -----------------------------------------------------------------
it is in a module that is sharded later        tied: the unit that has the parameter registers it there, too
an optimizer that was built before asks for    RuntimeError: it would train nothing, and say nothing
its gradient, in `step()` or `zero_grad()`
a write in place                               RuntimeError: it would not reach the model
its values, shape, attributes are read         as they were
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
    """A sharded parameter has taken the place of `original`, which has the same record."""
    original.__class__ = _retired(type(original))


@functools.cache
def _retired(kind: type) -> type:
    return type(f"Original{kind.__name__}", (Original, kind), {"__slots__": ()})


class Original:
    """Of parameters that are no module's any more."""

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
        f"{name} is held from before fully_shard, which has put a sharded one in its place: what an optimizer or a "
        "write does to the old one never reaches the model. Build the optimizer after fully_shard, from "
        "model.parameters(), and ask modules for their parameters again"
    )
