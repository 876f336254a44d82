"""Adjacent parameters of one `ParameterGroup` as one flat parameter, whose gradient is looked up at each access.

main weights of a group     | norm | qkv .... | out .... | up ......... |
one run                            |<------------------->|
its flat parameter                 a plain tensor, a view of this rank's part: the optimizer's step updates it
its `.grad`                        a DTensor over all ranks: gradient scalers and norms see the whole gradient
its `.grad` in a step              a plain tensor like the flat parameter: this rank's part of the main gradients
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
    """This rank's part of a run (adjacent parameters of one `ParameterGroup`), as one parameter. Each access of `.grad`
    reads the gradients of the run's parameters, so `.grad` is never stale."""

    _run: "weakref.ref[FlatRun]"

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradients of the run's parameters as one DTensor over all ranks. None if no parameter has a gradient.

        During an optimizer step: a plain tensor with this rank's part, or None (`FlatRun.begin_step` says when).
        """
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
    """A parameter of a run: its name in the model, and its record."""

    name: str
    record: ShardedParameter


class FlatRun:
    """A run: adjacent parameters of one `ParameterGroup` (the members), as one flat parameter in the same memory."""

    def __init__(self, group: ParameterGroup, members: Sequence[Member]) -> None:
        """`members`: adjacent parameters of `group`."""
        self.group = group
        self.members = list(members)
        self.parameters = [each.record.sharded for each in members]
        self._start, self._stop = members[0].record.extent.offset, members[-1].record.extent.end
        main = group.main_weight
        piece = group.layout.numel // main.pieces
        self._begin = max(main.index * piece, self._start)
        """The offset in the layout of this rank's first element of the run."""
        borders = (min(max(border * piece, self._start), self._stop) - self._start for border in range(main.pieces + 1))
        self._cuts = Cuts((self._stop - self._start,), tuple(borders), main.axes)
        self.flat = FlatParameter(_something(main.within(self._start, self._stop)))
        self.flat._run = weakref.ref(self)
        self._in_step = False
        self._here: torch.Tensor | None = None
        """This rank's part of the gradient, during a step."""

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def present(self) -> list[bool]:
        """For each member, whether it has a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]

    @property
    def gradient(self) -> torch.Tensor | None:
        """The members' gradients as one DTensor over all ranks, with zeros for a member without a gradient. None if no
        member has one. During an optimizer step: see `begin_step`."""
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
        """Begin an optimizer step. From now on `gradient` is None, until `take_gradient` sets it. `drop_gradient` sets
        it to None again.

        Call `group.gradients.main.take_over()` before `begin_step`.
        """
        self._in_step = True

    def take_gradient(self, wide: torch.Tensor | None) -> None:
        """Set `gradient` to a plain tensor with this rank's part of the gradients, or to None if no member has one.

        Without `wide`, the tensor is a view of the main gradients. Otherwise, it is a view of `wide`, to which the
        gradients are copied.
        """
        self._here = _something(self._window()) if any(self.present) else None
        if wide is not None and self._here is not None:
            self._here = wide[: self._here.numel()].copy_(self._here)

    def drop_gradient(self) -> None:
        """Set `gradient` to None. If it was a tensor, increment the autograd version counters of the flat parameter and
        of the members.

        Fused kernels do not increment the flat parameter's counter. The members share its memory, but have separate
        counters.
        """
        if self._here is not None:
            torch.autograd.graph.increment_version([self.flat, *self.parameters])
        self._here = None

    def end_step(self) -> None:
        """Make `gradient` a DTensor over all ranks again."""
        self._in_step = False

    def _window(self) -> torch.Tensor:
        return self.group.gradients.main.window(self._start, self._stop)

    def _over_all_ranks(self, local: torch.Tensor) -> UnevenDTensor:
        """Return a DTensor over all ranks with the local part `local`. It concatenates tensor-parallel slices."""
        main, parallel = self.group.main_weight, self.members[0].record.parallel
        placements: tuple[Placement, ...] = tuple(Shard(0) if p.is_shard() else p for p in main.placements)
        if parallel is None:
            return UnevenDTensor.make(local, self._cuts, main.mesh, placements)
        beyond = [Shard(0) if each.is_shard() else each for each in parallel.beyond]
        shape = torch.Size([self._cuts.shape[0] * parallel.slices()])
        return UnevenDTensor.make(local, self._cuts, parallel.mesh, (*placements, *beyond), shape=shape)

    # --- members ------------------------------------------------------------------------------------------------------

    def divided(self, keys: Sequence[Any]) -> "list[FlatRun]":
        """Return runs of adjacent members with equal `keys` (one key per member), or `[self]` if all keys are equal."""
        parts = [[at for at, _ in pairs] for _, pairs in groupby(enumerate(keys), key=lambda pair: pair[1])]
        if len(parts) == 1:
            return [self]
        return [FlatRun(self.group, [self.members[n] for n in part]) for part in parts]

    def _place(self, first: Member, last: Member) -> slice:
        """Return the slice of the flat parameter that holds the members from `first` to `last`."""
        numel = self.group.main_weight.within(self._start, self._stop).numel()
        start, stop = first.record.extent.offset - self._begin, last.record.extent.end - self._begin
        return slice(min(max(start, 0), numel), min(max(stop, 0), numel))

    def state_for(self, other: "FlatRun", state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the optimizer `state` that belongs to `other`, a run of some of this run's members."""
        place = self._place(other.members[0], other.members[-1])

        def narrowed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return _something(value[place]) if value.dim() else value.clone()

        return {key: narrowed(value) for key, value in state.items()}

    def part(self, member: Member, value: Any) -> Any:
        """Return the part of the optimizer state `value` that belongs to `member`, as a DTensor. A 0-D tensor, or a
        `value` that is not a tensor, is returned unchanged."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        like = member.record.sharded.detach()
        assert isinstance(like, UnevenDTensor)
        return like.like(like._cuts.shaped(value[self._place(member, member)], like.part))


def runs_of(
    group: ParameterGroup, names: Mapping[int, str], decays: Callable[[str, nn.Parameter], bool]
) -> Iterator[tuple[bool, FlatRun]]:
    """Yield `(decay, run)` for each run of `group`. The parameters of a run have the same `decay` and the same tensor
    parallelism. `decay`: whether these parameters get weight decay.

    `names`: maps the id of a parameter to its name in the model. `decays`: takes a name and a parameter, and returns
    `decay`.
    """

    def kind(member: Member) -> tuple[bool, Any, bool]:
        parallel = member.record.parallel
        decay = decays(member.name, member.record.sharded)
        return decay, parallel and parallel.mesh, parallel is not None and parallel.is_spread

    members = [Member(names[id(each.sharded)], each) for each in group.parameters]
    for (decay, _, _), run in groupby(members, key=kind):
        yield decay, FlatRun(group, list(run))


def _something(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a tensor with one zero if `tensor` is empty."""
    return tensor if tensor.numel() else tensor.new_zeros(1)
