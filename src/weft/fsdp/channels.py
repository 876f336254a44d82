"""The lanes (ordered communication queues) and the pools of transient memory of one model.

    lane         carries
    ----------   --------------------------------------------------
    gather       weights over the shard axis or both axes, uploads
    gathers      weights of several small units together
    outer        weights and gradients over the outer axis alone
    reduce       gradients over the shard axis
    reductions   gradients of several small units together
    download     gradients to CPU memory

The pool `weights` holds gathered weights, the pool `gradients` partial gradients.

If the transport has tags (gloo with CPU tensors), messages of different models never match, because each parameter
group has a separate channel number. Without tags, all ranks must run the models in the same order.
"""

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.groups import twin_group
from weft.comm.lanes import Lane
from weft.memory.pool import Pool

_twins: MutableMapping[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""The second communicator of a process group, which gathers use if `Channels.separate` is set."""


class Channels:
    """The lanes and pools of one model. `separate`: whether gathers use the communicators from `separate_gathers`."""

    def __init__(self, device: torch.device, *, planned: bool) -> None:
        self.separate = False
        self.weights = Pool(planned)
        self.gradients = Pool(planned)
        self.gather = Lane("gather", device)
        self.gathers = Lane("gathers", device)
        self.outer = Lane("outer", device)
        self.reduce = Lane("reduce", device)
        self.reductions = Lane("reductions", device)
        self.download = Lane("download", device)
        self.on_gather: Callable[[Any], None] = lambda unit: None  # called before a unit's gather starts
        self.on_renew: Callable[[Any], None] = lambda unit: None  # called before a unit is gathered again in a pass
        self.gradient_to_write: Callable[[Any], tuple[torch.Tensor, bool]]  # the method of the model's `Reductions`

    def share_lanes(self, other: "Channels") -> None:
        """Use the lanes of `other`, another model's channels, so that both models' communication has one order."""
        self.gather, self.outer, self.reduce, self.download = other.gather, other.outer, other.reduce, other.download
        self.gathers, self.reductions = other.gathers, other.reductions

    def of_gathers(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return the communicator for gathers over the ranks of `group`: a second one if `separate`, else `group`."""
        return _twins[group] if self.separate else group

    def separate_gathers(self, groups: Sequence[dist.ProcessGroup], choice: bool | Sequence[dist.ProcessGroup]) -> None:
        """Choose the communicators for gathers over `groups`, the model's process groups. Collective unless `choice`
        is False.

        - `choice=False`, or an empty list: `groups` themselves.
        - `choice=True`: a second communicator for each of `groups`, which all models share.
        - A list of second communicators: each belongs to the one of `groups` with the same ranks in the same order.
          For the remaining `groups`, as with True. Raises ValueError if a communicator in the list matches none of
          `groups`, or if an earlier model used another one for the same group.
        """
        self.separate = bool(choice)
        there = [dist.get_process_group_ranks(group) for group in groups]
        given = [] if isinstance(choice, bool) else [(dist.get_process_group_ranks(each), each) for each in choice]
        for ranks, _ in given:
            if ranks not in there:
                raise ValueError(
                    f"separate_all_gather_group: the process group has the ranks {ranks}, but weights are gathered "
                    f"over {', '.join(map(str, there))}: create it with exactly these ranks, in this order"
                )
        for group, ranks in zip(groups if self.separate else (), there):
            own = next((each for known, each in given if known == ranks), None)
            if own is not None and _twins.setdefault(group, own) is not own:
                raise ValueError(
                    f"separate_all_gather_group: an earlier model used another communicator for gathers over the ranks "
                    f"{ranks}: pass the same process group to every call of fully_shard"
                )
            if group not in _twins:
                _twins[group] = twin_group(group)
