"""Rules for the persistent buffers of your own model, such as the running statistics of BatchNorm.

    "broadcast"   after each step all ranks take the buffers of rank 0
    "mean"        after each step all ranks take the mean, or rank 0's value if the dtype is not a floating-point dtype
    "own"         each rank keeps its own buffers, and a checkpoint holds the buffers of every rank

"broadcast" and "mean" apply after every step, not only before a save, so that a resumed run equals an uninterrupted
one. Sharded buffers (DTensors) follow none of the rules.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.state import plain_name
from weft.comm.backends import world
from weft.comm.collectives import broadcast, reduce_now
from weft.models import HybridModel
from weft.train.errors import ConfigError

Rule = Literal["broadcast", "mean", "own"]


def buffers_of(model: nn.Module, rule: Rule) -> "Buffers | None":
    """Return the `Buffers` of `model`, or None for a HybridModel, whose buffers need no rule.

    Raises ConfigError for a HybridModel if `rule` is not "broadcast", the default.
    """
    if not isinstance(model, HybridModel):
        return Buffers(model, rule)
    if rule != "broadcast":
        raise ConfigError(
            f'train.buffers = "{rule}": has no effect on a model described by a pattern, '
            "whose buffers are the same on all ranks; leave it out"
        )
    return None


class Buffers:
    """The persistent unsharded buffers of `model`. With "own", a checkpoint holds the buffers of every rank."""

    per_rank = True

    def __init__(self, model: nn.Module, rule: Rule) -> None:
        self.rule = rule
        saved = {plain_name(name) for name in model.state_dict()}
        self._names = {
            plain_name(name): name
            for name, buffer in model.named_buffers()
            if plain_name(name) in saved and not isinstance(buffer, DTensor) and buffer.numel()
        }
        self._model = model
        self._are_absent = False
        """Whether the checkpoint to load does not hold the buffers of each rank, because its run had another rule."""

    @property
    def are_saved(self) -> bool:
        """Whether a checkpoint holds the buffers of each rank."""
        return self.rule == "own" and bool(self._names)

    def after_step(self) -> None:
        """Make the buffers equal on all ranks by the rule "broadcast" or "mean". With "own", do nothing. Collective."""
        if self.rule == "own" or not self._names or dist.get_world_size() == 1:
            return
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for buffer in self._now():
            groups[buffer.dtype, buffer.device].append(buffer)
        with torch.no_grad():
            for (dtype, _), buffers in groups.items():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                if self.rule == "mean" and dtype.is_floating_point:
                    reduce_now(flat, dist.ReduceOp.SUM, None, "the mean of buffers")
                    flat /= dist.get_world_size()
                else:
                    broadcast(flat, world(), "the buffers of rank 0")
                for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
                    buffer.copy_(part.view_as(buffer))

    def _now(self) -> Iterator[torch.Tensor]:
        known = dict(self._model.named_buffers())  # a module may have assigned a new tensor to a buffer
        return (known[name] for name in self._names.values())

    def prepare_load(self, stored: Mapping[str, Any]) -> None:
        """Record whether the checkpoint holds the buffers of every rank. `stored`: the entries for these buffers.

        Without entries, every rank keeps the buffers that were loaded with the model.
        """
        self._are_absent = not stored

    def state_dict(self) -> dict[str, Any]:
        absent, self._are_absent = self._are_absent, False  # for one load only
        return {} if absent else {"buffers": {name: buffer.clone() for name, buffer in zip(self._names, self._now())}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, buffer in zip(self._names, self._now()) if state else ():
            buffer.copy_(state["buffers"][name])

    def load_from_other_ranks(self, state: Mapping[str, Any], rank: int, ranks: int) -> None:
        """Load `state`, the buffers that rank 0 saved. Called on every rank if the number of ranks has changed since
        the save."""
        self.load_state_dict(state)
