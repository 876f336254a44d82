"""Neighbouring parameters of one group as one flat parameter, whose gradient is looked up on access.

main weights of a group     | norm | qkv .... | out .... | up ......... |
one run                            |<------------------->|
its flat parameter                 a view of what lies here, a plain tensor: what an optimizer's step works on
`.grad` of it                      a DTensor over all ranks: gradient scalers and norms see the whole
`.grad` of it in a step            a view of what lies here of the main gradients, as the parameter is
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _util_foreach_types

from weft.dtensor.uneven import UnevenDTensor
from weft.fsdp.group import ParameterGroup
from weft.fsdp.parameter import ShardedParameter
from weft.layout.cuts import Cuts


class FlatParameter(nn.Parameter):
    """This rank's part of a run. Its `.grad` is read from the run's parameters, so it cannot be stale."""

    _run: "weakref.ref[FlatRun]"

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradients of the run's parameters as one tensor over all ranks; None where none of them has one."""
        run = self._run()
        return run.gradient if run is not None else None

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        run = self._run()
        if run is not None:
            run.gradient = gradient


for _known in (_optim_foreach_types, _util_foreach_types):
    _known.append(FlatParameter)  # type: ignore[arg-type]


class Member(NamedTuple):
    """A parameter of a run: what the model calls it, and its record."""

    name: str
    record: ShardedParameter


class FlatRun:
    """Members `[first, last]` of a group as one flat parameter that shares their memory."""

    def __init__(self, group: ParameterGroup, members: Sequence[Member]) -> None:
        """`members`: neighbours in `group`."""
        self.group = group
        self.members = list(members)
        self.parameters = [each.record.sharded for each in members]
        self._start, self._stop = members[0].record.extent.offset, members[-1].record.extent.end
        main = group.main_weight
        piece = group.layout.numel // main.pieces
        self._begin = max(main.index * piece, self._start)
        """Of the layout's elements, the first that is here."""
        borders = (min(max(border * piece, self._start), self._stop) - self._start for border in range(main.pieces + 1))
        self._cuts = Cuts((self._stop - self._start,), tuple(borders), main.axes)
        self.flat = FlatParameter(_something(main.within(self._start, self._stop)))
        self.flat._run = weakref.ref(self)
        self._in_step = False
        self._here: torch.Tensor | None = None
        """The gradient in a step."""

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def present(self) -> list[bool]:
        """Which members have a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]

    @property
    def gradient(self) -> torch.Tensor | None:
        """The members' gradients, zero for those that have none beside others; None where none has one."""
        if self._in_step:
            return self._here
        if not any(self.present):
            return None
        self.group.gradients.main.take_over()
        return self._over_all_ranks(self._window())

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        if value is None:
            for parameter in self.parameters:
                parameter.grad = None
        elif not any(self.present) or getattr(value, "_local_tensor", None) is not self._window():
            local = value.to_local() if isinstance(value, DTensor) else value
            present = self.present
            for each, has_one in zip(self.members, present):
                if has_one or not any(present):
                    each.record.sharded.grad = self.part(each, local)

    def begin_step(self) -> None:
        """Until `end_step` there is a gradient between `take_gradient` and `drop_gradient` alone. The group's gradients
        are taken over already."""
        self._in_step = True

    def take_gradient(self, wide: torch.Tensor | None) -> None:
        """The gradient is the tensor that lies here, or that in the weights' dtype, in `wide` memory."""
        self._here = _something(self._window()) if any(self.present) else None
        if wide is not None and self._here is not None:
            self._here = wide[: self._here.numel()].copy_(self._here)

    def drop_gradient(self) -> None:
        """There is none any more; what the step wrote, the version counters know.

        Fused kernels do not count, and the wrappers of the sharded parameters cannot: they only share the memory.
        """
        if self._here is not None:
            torch.autograd.graph.increment_version([self.flat, *self.parameters])
        self._here = None

    def end_step(self) -> None:
        """The gradient is one over all ranks again."""
        self._in_step = False

    def _window(self) -> torch.Tensor:
        return self.group.gradients.main.window(self._start, self._stop)

    def _over_all_ranks(self, local: torch.Tensor) -> UnevenDTensor:
        """`local` with the other ranks' as one tensor; slices of tensor parallelism lie one behind the other."""
        main, parallel = self.group.main_weight, self.members[0].record.parallel
        placements: tuple[Placement, ...] = tuple(Shard(0) if p.is_shard() else p for p in main.placements)
        if parallel is None:
            return UnevenDTensor.make(local, self._cuts, main.mesh, placements)
        beyond = [Shard(0) if each.is_shard() else each for each in parallel.beyond]
        shape = torch.Size([self._cuts.shape[0] * parallel.slices])
        return UnevenDTensor.make(local, self._cuts, parallel.mesh, (*placements, *beyond), shape=shape)

    # --- members ------------------------------------------------------------------------------------------------------

    def divided(self, keys: Sequence[Any]) -> "list[FlatRun]":
        """Runs of neighbours with equal `keys`, one per member; this run itself where all are equal."""
        parts = [[at for at, _ in pairs] for _, pairs in groupby(enumerate(keys), key=lambda pair: pair[1])]
        if len(parts) == 1:
            return [self]
        return [FlatRun(self.group, [self.members[n] for n in part]) for part in parts]

    def _place(self, first: Member, last: Member) -> slice:
        """Where in the flat parameter the parts of members lie."""
        numel = self.group.main_weight.within(self._start, self._stop).numel()
        start, stop = first.record.extent.offset - self._begin, last.record.extent.end - self._begin
        return slice(min(max(start, 0), numel), min(max(stop, 0), numel))

    def state_for(self, other: "FlatRun", state: dict[str, Any]) -> dict[str, Any]:
        """The `state` of this run's flat parameter, cut to `other`, a run of some of its members."""
        place = self._place(other.members[0], other.members[-1])

        def narrowed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return _something(value[place]) if value.dim() else value.clone()

        return {key: narrowed(value) for key, value in state.items()}

    def part(self, member: Member, value: Any) -> Any:
        """The part of a state `value` of the flat parameter that belongs to one member."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        like = member.record.sharded.detach()
        assert isinstance(like, UnevenDTensor)
        return like.like(like._cuts.shaped(value[self._place(member, member)], like.part))


def runs_of(
    group: ParameterGroup, names: Mapping[int, str], decays: Callable[[str, nn.Parameter], bool]
) -> Iterator[tuple[bool, FlatRun]]:
    """The group's parameters in runs of neighbours that decay alike, and are alike slices or none: `(decays, run)`.

    `names`: in the model, by the parameters' ids.
    """

    def kind(member: Member) -> tuple[bool, Any, bool]:
        parallel = member.record.parallel
        decay = decays(member.name, member.record.sharded)
        return decay, parallel and parallel.mesh, parallel is not None and parallel.is_spread

    members = [Member(names[id(each.sharded)], each) for each in group.parameters]
    for (decay, _, _), run in groupby(members, key=kind):
        yield decay, FlatRun(group, list(run))


def _something(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or one zero in place of an empty one."""
    return tensor if tensor.numel() else tensor.new_zeros(1)
