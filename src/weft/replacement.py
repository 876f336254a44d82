"""`drop_in()`: replaces torch's FSDP2 with weft in programs whose imports cannot be changed.

Code that looks up `torch.distributed.fsdp.fully_shard` then finds weft's function. Policies are not replaced, because
weft accepts torch's. Checkpoints, optimizers, clipping and Distributed State Dicts need no replacement.
"""

import sys
from types import ModuleType
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from weft.fsdp.fully_shard import fully_shard
from weft.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx

_NAMES: tuple[Any, ...] = (fully_shard, FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx)
_OURS = {id(getattr(torch_fsdp, ours.__name__)): ours for ours in _NAMES}
"""Maps the id of each replaced torch object to weft's. torch's private modules keep the torch objects alive."""
_DEFINING = "torch.distributed.fsdp._fully_shard."


class DropIn:
    """The names that `drop_in` has replaced. `print` lists them. In a `with` statement, torch's objects are restored at
    the end of the block."""

    def __init__(self, places: list[tuple[ModuleType, str, Any]]) -> None:
        self._places = places
        self.replaced = tuple(f"{module.__name__}.{name}" for module, name, _ in places)

    def undo(self) -> None:
        """Restore torch's objects where `drop_in` replaced them. Modules that were imported after `drop_in` keep
        weft's."""
        while self._places:
            module, name, theirs = self._places.pop()
            setattr(module, name, theirs)

    def __enter__(self) -> "DropIn":
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()

    def __str__(self) -> str:
        modules: dict[str, list[str]] = {}
        for place in self.replaced:
            module, _, name = place.rpartition(".")
            modules.setdefault(module, []).append(name)
        lines = [f"  {module}: {', '.join(names)}" for module, names in modules.items()]
        return "\n".join([f"weft in place of torch's FSDP2, {len(self.replaced)} names:", *lines])

    __repr__ = __str__


def drop_in() -> DropIn:
    """Replace torch's `fully_shard`, `FSDPModule`, `UnshardHandle`, `register_fsdp_forward_method` and `share_comm_ctx`
    with weft's, in the global names of all imported modules except the private torch modules that define these objects.
    Other references, such as attributes of classes, keep torch's objects.

    Call `drop_in` before you shard anything. Libraries may be imported before the call or after it: later imports from
    `torch.distributed.fsdp` get weft's objects. If a library is later imported that takes them from the private
    modules, call `drop_in` again.

    The replacement lasts until the process ends, until a block `with weft.drop_in() as replaced:` ends, or until
    `undo()` of the result is called. `print` the result to see the replaced names.
    """
    places = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith((_DEFINING, "weft.")):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in _OURS:
                places.append((module, attribute, value))
    for module, attribute, value in places:
        setattr(module, attribute, _OURS[id(value)])
    return DropIn(places)
