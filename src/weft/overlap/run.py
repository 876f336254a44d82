"""Runs this rank's entries of a schedule's table: steps, gathers of the sharded units that steps need, and messages
between stages."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.comm import streams
from weft.comm.collectives import reduce_now
from weft.comm.groups import exchange_objects
from weft.comm.ranges import profiled
from weft.fsdp.module import FSDPModule
from weft.overlap.border import Border
from weft.overlap.chunk_pass import ChunkPass
from weft.overlap.entries import table_order
from weft.overlap.layer import StagedLayer
from weft.overlap.microbatch import Microbatch
from weft.overlap.order import BACKWARD, FORWARD, Layer, Part, Step, combined_order
from weft.overlap.units import Around, ModelUnits
from weft.pipeline.actions import Table
from weft.pipeline.placement import Cut
from weft.pipeline.transport import Transport

CHECKED_MICROBATCHES = 4
_checked: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
"""For each model, how many microbatches `forward_backward` has run. It searches the first `CHECKED_MICROBATCHES` for
undeclared tensors."""
_transports: "weakref.WeakKeyDictionary[nn.Module, Transport]" = weakref.WeakKeyDictionary()


class ScheduledRun:
    """One call of `forward_backward` or `evaluate`. `layers`: the model's layers on this rank. `scales`: a loss scale
    for each microbatch.

    `depths`: for each depth of multi-token prediction that runs, its layers. They follow the layers of the last stage.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[StagedLayer],
        depths: Sequence[Sequence[StagedLayer]],
        cut: Cut,
        microbatches: Sequence[Microbatch],
        scales: Sequence[float],
        *,
        converted: bool = False,
    ) -> None:
        """`converted`: whether the model's compute dtypes have changed on any rank since its last schedule."""
        self._model = model
        self._layers = [*layers, *(layer for depth in depths for layer in depth)]
        self._cut = cut
        self._microbatches = microbatches
        self._scales = scales
        self._units = ModelUnits.of(model, layers, depths)
        self._device = microbatches[0].tokens.device
        self._transport = _transport_of(model, cut, self._device)
        if self._transport is not None and converted:
            self._transport.forget_shapes()
        self._borders = [Border.of(self._transport, border) for border in range(len(cut.segments) - 1)]
        self._numbers = _numbers(cut)
        self._unchecked = CHECKED_MICROBATCHES - _checked.get(model, 0)
        self._delayed: set[tuple[int, int]] = set()
        """The (microbatch, chunk) pairs whose layers compute weight gradients in separate steps."""
        self._apart: set[tuple[int, int]] = set()
        """The (microbatch, chunk) pairs whose weight gradients, including the head's, have their own table entries."""
        self._halves: set[tuple[int, int]] = set()
        """The (microbatch, chunk) pairs that exchange the rows of each half of the tokens separately."""
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] | None = None
        """The outputs of the last stage by microbatch, if requested."""

    def forward_backward(
        self,
        table: Table,
        *,
        overlap: bool,
        delay_wgrad: bool,
        early_release: bool,
        halves: bool,
        trace: list[Step] | None,
    ) -> None:
        """Run this rank's entries of `table`. `trace`: a list that receives each step."""
        entries = table.ranks[self._cut.rank]
        switches = {"overlap": overlap, "delay_wgrad": delay_wgrad, "early_release": early_release}
        steps = table_order(entries, self._part, **switches, queues=streams.has_streams(self._device))
        self._apart = {action[1:] for entry in entries for action in entry if action.kind == "W"}
        self._delayed = {action[1:] for entry in entries for action in entry if delay_wgrad} | self._apart
        alone = {entry[0][1:] for entry in entries if len(entry) == 1 and entry[0].kind != "W"}
        self._halves = alone if halves else set()
        together = [{action[1:] for action in entry} for entry in entries if len(entry) == 2 and entry[0].kind == "B"]
        ends = SharedEnds(self._model, self._cut, self._transport)
        with torch.enable_grad():
            self._carry_out(list(steps), trace, together if overlap else ())
        ends.add_up()
        _checked[self._model] = CHECKED_MICROBATCHES - self._unchecked + len(self._microbatches)

    def evaluate(self, *, outputs: bool = False) -> None:
        """Run all forwards without gradients, chunk by chunk. `outputs`: keep the model's outputs."""
        self._outputs = {} if outputs else None
        steps = (
            step
            for chunk in range(self._cut.chunks)
            for number in range(len(self._microbatches))
            for step in combined_order(self._part(number, chunk), None, delay_wgrad=False, early_release=False)
        )
        with torch.no_grad():
            self._carry_out(list(steps), None)

    def losses(self) -> list[Tensor]:
        """Return the losses of all microbatches. All ranks of the pipeline must call this method, and all get them."""
        if self._cut.group is None:
            return [self._losses[number] for number in sorted(self._losses)]
        return _shared(self._losses, len(self._microbatches), self._cut, self._device)

    def outputs(self, *, everywhere: bool) -> Tensor | None:
        """Return the outputs of all microbatches, concatenated along the batch dimension.

        With `everywhere`, all ranks of the pipeline must call this method, and all get the outputs. Otherwise only the
        rank of the last stage gets them, and the others get None.
        """
        found = None
        if self._outputs:
            found = torch.cat([self._outputs[number] for number in sorted(self._outputs)])
        if not everywhere or self._cut.group is None:
            return found
        said = None if found is None else (tuple(found.shape), found.dtype)
        shape, dtype = next(filter(None, exchange_objects(said, self._cut.group, "shapes of outputs")))
        merged = torch.zeros(shape, dtype=dtype, device=self._device) if found is None else found
        return reduce_now(merged, dist.ReduceOp.SUM, self._cut.group, "outputs of an evaluation")

    def _carry_out(
        self, steps: Sequence[Step], trace: list[Step] | None, together: Sequence[set[tuple[int, int]]] = ()
    ) -> None:
        program = self._units.program(steps, together)
        self._foresee(program)
        try:
            with self._units.scheduled(program, backward=torch.is_grad_enabled()):
                self._go_through(program, trace)
        except BaseException:
            if self._transport is not None:
                self._transport.forget()
            raise
        if self._transport is not None:
            self._transport.finish()

    def _go_through(self, program: Sequence[Around], trace: list[Step] | None) -> None:
        passes: dict[tuple[int, int], ChunkPass] = {}  # in flight; a pass and its state are freed after its last step
        left = Counter((around.step.microbatch, around.step.chunk) for around in program)
        last = {around.step.chunk: around.step.microbatch for around in program}
        for around in program:
            step = around.step
            place = step.microbatch, step.chunk
            if place not in passes:
                passes[place] = self._pass(step)
            current = passes[place]
            try:
                self._units.before(around, current, last=step.microbatch == last[step.chunk])
                if trace is not None:
                    trace.append(step)
                with profiled(self._where(step), f"{step.direction}.{step.slot}"):
                    current.run(step)
                self._units.after(around, current)
            except BaseException as error:
                self._units.failed(self._said(step), error)
                raise
            if (step.direction, step.slot) == (FORWARD, "head"):
                if current.loss is not None:
                    self._losses[step.microbatch] = current.loss
                if self._outputs is not None:
                    self._outputs[step.microbatch] = current.outputs
            left[place] -= 1
            if not left[place]:
                del passes[place]

    def _pass(self, step: Step) -> ChunkPass:
        number, stage = step.microbatch, self._cut.stage(step.chunk)
        last, place = len(self._borders), (step.microbatch, step.chunk)
        return ChunkPass(
            self._model,
            self._layers,
            self._units,
            number,
            self._microbatches[number],
            before=self._borders[stage - 1] if stage else None,
            behind=self._borders[stage] if stage < last else None,
            key=self._key(number),
            delay_wgrad=place in self._delayed,
            apart=place in self._apart,
            halves=place in self._halves,
            loss_scale=self._scales[number],
            check=number < self._unchecked and torch.is_grad_enabled(),
            scores=self._outputs is not None,
        )

    def _part(self, microbatch: int, chunk: int) -> Part:
        stage = self._cut.stage(chunk)
        last = stage == len(self._borders)
        layers = [Layer(number, self._layers[number].stages) for number in self._numbers[chunk]]
        for depth in self._units.depths if last else ():
            mine = [Layer(number, self._layers[number].stages) for number in depth.layers]
            mine[0] = Layer(mine[0].number, ("enter", *mine[0].stages))
            mine[-1] = Layer(mine[-1].number, (*mine[-1].stages, "leave"))
            layers += mine
        return Part(microbatch, layers, chunk, first=stage == 0, last=last)

    def _key(self, number: int) -> Any:
        """Return a key that is equal for microbatches whose messages between stages have the same shapes."""
        return self._microbatches[number].shapes, self._model.training

    def _foresee(self, program: Sequence[Around]) -> None:
        """Tell each channel, in order, the messages that it will receive."""
        if self._transport is None:
            return
        coming: dict[Any, list] = defaultdict(list)
        for around in program:
            step, stage = around.step, self._cut.stage(around.step.chunk)
            if (step.direction, step.slot) == (FORWARD, "receive"):
                coming[self._transport.channel(stage - 1, FORWARD)].append(self._key(step.microbatch))
            elif (step.direction, step.slot) == (BACKWARD, "send"):
                coming[self._transport.channel(stage, BACKWARD)].append(self._key(step.microbatch))
        for channel, keys in coming.items():
            if channel is not None:
                channel.foresee(keys)

    def _where(self, step: Step) -> str:
        stage = [f"stage {self._cut.stage(step.chunk)}"] if len(self._cut.segments) > 1 else []
        layer = [f"layer {step.layer}"] if step.layer is not None else []
        return "/".join([f"microbatch {step.microbatch}", *stage, *layer])

    def _said(self, step: Step) -> str:
        if len(self._cut.segments) == 1:
            return str(step)
        return f"{step} (stage {self._cut.stage(step.chunk)})"


class SharedEnds:
    """The parameters that the first and the last stage share. Each stage adds the other's gradients to its own, so that
    both have the same sum.

    At the beginning of the next call of `forward_backward`, before gradients are added, the constructor sets the
    gradients on the rank of the last stage to None. Otherwise, both stages would contribute the sum of earlier calls,
    and it would count twice.
    """

    def __init__(self, model: Any, cut: Cut, transport: Transport | None) -> None:
        shares = cut.shares_ends and (cut.is_first or cut.is_last)
        modules = model.shared_ends if shares else ()
        self._parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
        if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in self._parameters):
            raise ValueError(
                "the first and the last stage share a parameter that has a hook on its accumulated gradient, which "
                "would see only the gradient of its own stage: step the optimizer after the call"
            )
        apart = () if isinstance(model, FSDPModule) else getattr(model, "tied_ends", ())  # FSDP sums both uses
        if any(getattr(each, "_post_accumulate_grad_hooks", None) for module in apart for each in module.parameters()):
            raise ValueError(
                "a parameter that the model uses both before and after its layers has a hook on its accumulated "
                "gradient, which a schedule would call once for each use: step the optimizer after the call, "
                "or shard the model"
            )
        self._cut = cut
        self._transport = transport
        for parameter in self._parameters if cut.has_copies else ():
            parameter.grad = None

    @torch.no_grad()
    def add_up(self) -> None:
        """Exchange gradients with the other stage and add them.

        A parameter is skipped if neither rank has a gradient, as when the reduction of gradients is deferred to a later
        call. If only one rank has a gradient, the other's counts as zeros.
        """
        if self._transport is None or not self._parameters:
            return
        here = [float(each.grad is not None) for each in self._parameters]
        flags = torch.tensor(here, dtype=torch.float32, device=self._parameters[0].device)
        for parameter, mine, other in zip(self._parameters, here, self._transport.swap(flags).tolist()):
            if not mine and not other:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            part.add_(self._transport.swap(part))
            parameter.grad = gradient


def _numbers(cut: Cut) -> list[range]:
    """Return, for each chunk, the range of its layers among the layers of this rank."""
    found, first = [], 0
    for segment in cut.mine:
        found.append(range(first, first + len(segment)))
        first += len(segment)
    return found


def _transport_of(model: Any, cut: Cut, device: torch.device) -> Transport | None:
    if cut.group is None:
        return None
    if model not in _transports:
        _transports[model] = Transport(cut, device)
    return _transports[model]


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _shared(losses: dict[int, Tensor], count: int, cut: Cut, device: torch.device) -> list[Tensor]:
    """Return the last stage's losses on all ranks of the pipeline, with an all-reduce to which the other ranks
    contribute zeros."""
    words = torch.zeros(count + 1, dtype=torch.float64, device=device)
    if losses:
        words[:count] = torch.stack([losses[number] for number in range(count)])
        words[count] = _DTYPES.index(losses[0].dtype)
    reduce_now(words, dist.ReduceOp.SUM, cut.group, "losses of a schedule")
    return list(words[:count].to(_DTYPES[int(words[count])]).unbind())
