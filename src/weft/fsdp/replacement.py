"""`drop_in()`: weft's names in the place of torch's, for programs whose imports one cannot change.

    where a name is looked up                              before drop_in()    after
    -----------------------------------------------------  ------------------  ------
    torch.distributed.fsdp.fully_shard, by any caller      torch's             weft's
    a library that has imported it: accelerate, ...        torch's             weft's
    a library that is imported later                                           weft's
    torch's own private modules, which define it           torch's             torch's

Functions and classes are replaced; policies are not, since weft takes torch's. Checkpoints, optimizers, clipping and
Distributed State Dicts need no replacement.
"""

import sys
from types import ModuleType, TracebackType
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from weft.fsdp.fully_shard import fully_shard
from weft.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx

_OURS: dict[str, Any] = {
    "fully_shard": fully_shard,
    "FSDPModule": FSDPModule,
    "UnshardHandle": UnshardHandle,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
_THEIRS = [(getattr(torch_fsdp, name), ours) for name, ours in _OURS.items()]
_DEFINING = "torch.distributed.fsdp._fully_shard."


class DropIn:
    """What `drop_in` has replaced: as text, and as a context that puts torch's names back at its end."""

    def __init__(self, places: list[tuple[ModuleType, str, Any]]) -> None:
        self._places = places
        self.replaced = tuple(f"{module.__name__}.{name}" for module, name, _ in places)

    def undo(self) -> None:
        """Put torch's names back where they were replaced. What was imported in between keeps weft's."""
        while self._places:
            module, name, theirs = self._places.pop()
            setattr(module, name, theirs)

    def __enter__(self) -> "DropIn":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        modules: dict[str, list[str]] = {}
        for place in self.replaced:
            module, _, name = place.rpartition(".")
            modules.setdefault(module, []).append(name)
        lines = [f"  {module}: {', '.join(names)}" for module, names in modules.items()]
        return "\n".join([f"weft in the place of torch's FSDP2, {len(self.replaced)} names:", *lines])

    __repr__ = __str__


def drop_in() -> DropIn:
    """Put weft's `fully_shard` and what belongs to it in the place of torch's, wherever they are looked up.

    For the process, or as a context: `with weft.drop_in() as replaced`. Call it after the libraries are imported or
    before, and before anything is sharded; `print` the result to see what it has replaced. A second call replaces what
    is new since the first.
    """
    ours = {id(theirs): mine for theirs, mine in _THEIRS}
    places = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith((_DEFINING, "weft.")):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in ours:
                places.append((module, attribute, value))
    for module, attribute, value in places:
        setattr(module, attribute, ours[id(value)])
    return DropIn(places)
