"""One captured function: its forward and its backward, and an autograd node that replays them.

    forward    inputs -> static inputs | replay | static outputs -> outputs
    backward   gradients of outputs -> static ones | replay | static gradients -> autograd

Between a forward and its backward a capture is busy: the next forward would overwrite the values saved for the
backward. If weight gradients are delayed, a separate recording computes them after the backward. The capture stays busy
until this recording has run.

As for an eager call, autograd accumulates the gradients of parameters in `.grad`. It refuses a backward that reads a
parameter or buffer that was written to since the forward.

result of the function             result of a replay
---------------------------------  -------------------------------------------------------------------------------
an argument, parameter or buffer   that object
one tensor in several places       one tensor in the same places
a view of an argument              not a view; autograd refuses a backward after a write to either of the two
other tensors                      static outputs or copies of them
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from weft.fsdp.gradients.direct import substituting, whole
from weft.graphs import tape
from weft.graphs.attributes import Attributes
from weft.graphs.backward import Backward, Uses
from weft.graphs.capture import CONSTANTS, Backend, CaptureRefused, Delays
from weft.graphs.generators import nothing_drawn
from weft.graphs.places import Places, Ranges, has_hooks, hooked, local, range_of, touches
from weft.graphs.statics import Sample, Static, copied

POISON = False
"""For tests: overwrite the results of a capture before each replay, and all its memory after its backward."""


class Lease:
    """Keeps a capture busy from a replayed forward until the forward's autograd graph is freed and its delayed weight
    gradients are computed. `queue`: the function mode that delays weight gradients, or None."""

    def __init__(self, captured: "Captured", queue: Delays | None) -> None:
        self._captured = captured
        self.queue = queue

    def end(self) -> None:
        """Mark the capture as not busy, so that it can be replayed for another forward."""
        self._captured.rest()


class Captured:
    """A capture of the forward and the backward of `function`.

    - `leaves`, `spec`: the arguments of the function, as pytree's `tree_flatten` returns them.
    - `places`: the parameters and buffers that the function may read.
    - `gradients`: the layout (a `Sample`) of each gradient that an output had in an eager call. The key is the output's
      index among the tensors that the function returns.
    - `count`: called with the reason each time the backward, or a part of it, runs eagerly.
    - `queue`: the function mode that delays weight gradients. None: they are not delayed.

    Raises CaptureRefused if the function cannot be captured.
    """

    def __init__(
        self,
        backend: Backend,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        spec: TreeSpec,
        places: Places,
        gradients: Mapping[int, Sample],
        count: Callable[[str], None],
        queue: Delays | None = None,
    ) -> None:
        self.ready = False
        """Whether replays are allowed: only after the ranks have agreed on this capture (`GraphTable.agree`)."""
        self._count = count
        self._delays: Any = None if queue is None else queue.fresh()
        spread: list[Any] = [each for each in places.tensors() if isinstance(each, DTensor)]
        if not all(map(places.is_owned, spread)):
            raise CaptureRefused("one of its weights is a DTensor that is in no unit")
        if any(map(hooked, places.tensors())):
            raise CaptureRefused("a hook on the gradient of a gathered weight would not run")
        if any(map(has_hooks, places.modules[1:])):
            raise CaptureRefused("a module inside it has hooks, which a replay would not run")
        self.addresses = places.addresses()
        self._places = places
        self._holder: weakref.ref[Lease] | None = None
        self._numbers = distinct(leaves)
        tensors = [leaves[number] for number in self._numbers]
        self._inputs = [Static(Sample.of(each)) for each in tensors]
        with torch.no_grad():
            for static, tensor in zip(self._inputs, tensors):
                static.fill(tensor)
        self._entered: list[tuple[Any, DeviceMesh]] = []
        """The weights whose gradients are summed over ranks outside of a replay, each with the mesh of these ranks. A
        weight has one entry for each use."""
        self.python = Attributes(places.modules, function)
        try:
            with places.restored(), nothing_drawn():
                self._capture(backend, function, leaves, spec, gradients)
        finally:
            changed = self.python.difference()
            self.python.restore()
        if changed is not None:
            raise CaptureRefused(f"it sets attributes of its modules, which a replay would not ({changed})")

    def _capture(
        self,
        backend: Backend,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        spec: TreeSpec,
        gradients: Mapping[int, Sample],
    ) -> None:
        tensors = [leaves[number] for number in self._numbers]
        memory = [each.tensor for each in self._inputs]
        entered = [each.detach().requires_grad_(tensor.requires_grad) for each, tensor in zip(memory, tensors)]
        statics = {id(tensor): static for tensor, static in zip(tensors, entered)}
        arguments = [statics.get(id(each), each) for each in leaves]
        known = [*map(range_of, memory), *self._places.ranges()]
        alike: list[Tensor] = []

        def enter(parameter: Any, mesh: DeviceMesh) -> Tensor:
            tensor = local(parameter).detach().requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                self._entered.append((parameter, mesh))
                alike.append(tensor)
            return tensor

        def forward() -> Any:
            alike.clear()  # a backend may run this function twice
            self._entered.clear()
            args, kwargs = tree_unflatten(arguments, spec)
            with self._delays or nullcontext():
                result = function(*args, **kwargs)
            left, form = tree_flatten((args, kwargs))
            if form != spec or any(each is not given for each, given in zip(left, arguments)):
                raise CaptureRefused("it changes a list or dict among its arguments, which a replay would not")
            return result

        buffers = [each for each in self._places.tensors() if not isinstance(each, nn.Parameter)]
        before = [each._version for each in buffers]
        stand_ins = self._places.stand_ins()
        with substituting(answer=_refuse, enter=enter), self._places.replaced(stand_ins):
            result, self._forward = backend.capture(forward, known)
        self._changed = [each for each, version in zip(buffers, before) if each._version != version]
        """Buffers that the forward changes."""
        results, self._spec = tree_flatten(result)
        for value in results:
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise CaptureRefused(f"it returns a {type(value).__name__}, which a replay cannot create")
        numbered = self._hand_out(results, entered, stand_ins)
        outputs = [each for _, each in numbered]
        ends = [each for each in outputs if each.requires_grad]
        trained = self._places.trained()
        self._needs = [number for number, each in enumerate(entered) if each.requires_grad]
        # If the function reaches a parameter other than through its modules, it uses the parameter, not the stand-in.
        leaves_of = [*(entered[number] for number in self._needs), *alike, *stand_ins.values(), *trained]
        # Pass edges, not tensors. With tensors, `torch.autograd.grad` exits function modes, but a checkpoint in the
        # function must recompute under the modes of its forward.
        uses = Uses([*map(get_gradient_edge, ends)], leaves_of)
        if not uses.of:
            raise CaptureRefused("nothing in it needs a gradient")
        self._trained, self._uses = [*stand_ins, *trained], uses.of
        # The caller may keep gradients of inputs and of unsharded parameters beyond the next replay. weft copies the
        # others before: those of sharded parameters when their unit's backward ends, and those that are summed over
        # ranks when this function's backward ends.
        may_be_kept = (
            [True] * len(self._needs) + [False] * len(alike) + [not self._places.is_owned(it) for it in self._trained]
        )
        kept = [may_be_kept[leaf] for leaf in self._uses]
        self._outputs = [each.data for each in outputs]
        self._differentiable = [each.requires_grad for each in outputs]
        known += [*self._forward.memory(), *map(range_of, outputs)]

        def capture(function: Callable[[], Any], more: Ranges) -> tuple[Any, Any]:
            return backend.capture(function, [*known, *more], self._forward)

        # `Backward` may record another form of gradients later. The saved tensors then contain the values of the latest
        # replay, whose backward is recorded. `Backward` resets their versions, so that autograd does not refuse them.
        saved = [*self._places.tensors(), *map(local, self._places.tensors()), *entered]
        self._backward = Backward(capture, uses, saved, trained, self._places.restored, self._count, self._delays, kept)
        samples = [gradients.get(number) for number, each in numbered if each.requires_grad]
        self._check_later(outputs, entered, self._backward.begin(samples, [*map(Sample.of, ends)]))

    def _hand_out(
        self, results: Sequence[Any], entered: Sequence[Tensor], stand_ins: Mapping[nn.Parameter, nn.Parameter]
    ) -> list[tuple[int, Tensor]]:
        """Determine how a replay creates each result. Return the tensors that the forward creates, each with its index
        among all tensors that it returns."""
        own = {id(each): partial(_argument, number) for number, each in zip(self._numbers, entered)}
        own |= {id(each): partial(_constant, each) for each in self._places.tensors()}
        own |= {id(other): partial(_constant, each) for each, other in stand_ins.items()}
        self._hands: list[Callable[[Sequence[Any], Sequence[Tensor]], Any]] = []
        made: list[tuple[int, Tensor]] = []
        for number, each in enumerate(results):
            if isinstance(each, Tensor) and id(each) not in own:
                if each.requires_grad and each.is_leaf:
                    raise CaptureRefused("it returns a new leaf tensor, which would get no gradient")
                copied(each)  # raises CaptureRefused if it cannot be copied
                own[id(each)] = partial(_output, len(made))
                made.append((sum(isinstance(it, Tensor) for it in results[:number]), each))
            self._hands.append(own[id(each)] if isinstance(each, Tensor) else partial(_constant, each))
        return made

    def _check_later(self, outputs: Sequence[Tensor], entered: Sequence[Tensor], reads: Ranges | None) -> None:
        """Determine the tensors whose versions autograd must check in a backward.

        `reads`: the memory that a backward reads. None if it is unknown. Sets these attributes:

        - `_read`: the parameters and buffers to check
        - `_shown`: the indices of inputs that share memory with an output
        - `_saved`, `_shared`: for each output, whether a backward reads it, and whether it shares memory with another
          tensor.
        """
        places, ranges = [*self._places.tensors()], [*map(range_of, outputs)]
        own = [range_of(local(each)) for each in places]
        self._read = [each for each, place in zip(places, own) if reads is None or touches(place, reads)]
        self._saved = [reads is None or touches(each, reads) for each in ranges]
        # A write to one of two tensors that share memory modifies both.
        given = [*map(range_of, entered)]
        self._shared = [
            touches(each, [*given, *own, *ranges[:number], *ranges[number + 1 :]]) for number, each in enumerate(ranges)
        ]
        self._shown = [number for number, each in enumerate(given) if touches(each, ranges)]
        self._read += [each for each, place in zip(places, own) if touches(place, ranges)]

    @property
    def nbytes(self) -> int:
        """The memory of the capture in bytes: of its static inputs, its forward and its backward."""
        statics = sum(each.tensor.untyped_storage().nbytes() for each in self._inputs)
        return statics + self._forward.nbytes + self._backward.nbytes

    def holder(self) -> Lease | None:
        """Return the lease of the forward in flight, or None."""
        return None if self._holder is None else self._holder()

    def run(self, leaves: Sequence[Any], *, copies: bool, queue: Delays | None = None) -> Any:
        """Replay the forward with the arguments `leaves`, and return the function's result.

        `copies`: whether to return copies of the static outputs. The next replay overwrites the static outputs, but not
        the copies. `queue`: the function mode to which the backward adds its delayed weight gradients. None: they are
        not delayed.
        """
        lease = Lease(self, queue)
        self._holder = weakref.ref(lease)
        inputs = [leaves[number] for number in self._numbers]
        alike = [whole(parameter, mesh) for parameter, mesh in self._entered]
        used = [*(inputs[number] for number in self._needs), *alike, *self._trained]
        made = _Replayed.apply(self, lease, copies, inputs, *[used[number] for number in self._uses])
        return tree_unflatten([hand(leaves, made) for hand in self._hands], self._spec)

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], *, copies: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Copy `inputs` into the static inputs (the tensors that the capture reads), and replay the forward. `copies`:
        see `run`.

        Return all outputs, the outputs that are not differentiable, and the tensors that must not be written to before
        the backward.
        """
        if POISON:
            self._forward.poison()
        for static, given in zip(self._inputs, inputs):
            static.fill(given)
        self._forward.replay()
        # The replay has changed these tensors without incrementing their version counters. Increment them, so that
        # autograd refuses a backward for which earlier values were saved.
        torch.autograd.graph.increment_version(self._changed if copies else [*self._changed, *self._outputs])
        outputs = [copied(each) if copies else each.detach() for each in self._outputs]
        constant = [each for each, needs in zip(outputs, self._differentiable) if not needs]
        saved = [*self._read, *(inputs[number] for number in self._shown)]
        for each, read, shared in zip(outputs, self._saved, self._shared):
            if shared or (read and not copies):
                saved.append(each)
        return outputs, constant, saved

    @torch.no_grad()
    def backward(self, gradients: Sequence[Tensor | None], lease: Lease, *, ends: bool) -> Sequence[Tensor | None]:
        """Replay the backward, and return a gradient for each use of a leaf (see `Uses`). Delayed weight gradients are
        added to the lease's queue, not computed. `ends`: whether autograd frees the graph after this backward. If so,
        the lease ends when the delayed gradients (if any) have been computed."""
        if self._places.addresses() != self.addresses:
            raise RuntimeError(
                "weights of a captured function have moved, or were frozen, between its forward and its backward: "
                "leave its module out of weft.Graphs"
            )
        wanted = [each for each, needs in zip(gradients, self._differentiable) if needs]
        found, delayed = self._backward.run(wanted, poisoned=POISON)
        if delayed is not None:
            _queue(lease, delayed, ends=ends)
        elif ends:
            lease.end()
        return found

    def rest(self) -> None:
        """Record that no forward is in flight."""
        self._holder = None
        if POISON:
            with torch.no_grad():
                for each in (*(static.tensor for static in self._inputs), *self._backward.statics):
                    tape.poison(each)
            self._forward.poison()


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, captured: Captured, lease: Lease, copies: bool, inputs: Sequence[Tensor], *used: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.captured, ctx.lease = captured, lease
        ctx.set_materialize_grads(False)
        outputs, constant, saved = captured.forward(inputs, copies=copies)
        ctx.save_for_backward(*saved)  # autograd refuses a backward after a write to one of these
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through a captured module: a replayed backward has no graph; leave the module out "
                "of weft.Graphs"
            )
        ctx.saved_tensors  # noqa: B018  # raises after writes, and in a second backward without retain_graph
        ends = not torch._C._autograd._get_current_graph_task_keep_graph()
        return (None, None, None, None, *ctx.captured.backward(gradients, ctx.lease, ends=ends))


def _queue(lease: Lease, delayed: Callable[[], None], *, ends: bool) -> None:
    def run() -> None:
        delayed()
        if ends:
            lease.end()

    assert lease.queue is not None
    lease.queue.add(run)


def _constant(value: Any, leaves: Sequence[Any], made: Sequence[Tensor]) -> Any:
    return value


def _argument(number: int, leaves: Sequence[Any], made: Sequence[Tensor]) -> Any:
    return leaves[number]


def _output(number: int, leaves: Sequence[Any], made: Sequence[Tensor]) -> Any:
    return made[number]


def _refuse(parameter: nn.Parameter) -> Any:
    raise CaptureRefused("a forward in it asks for gradients of weights (weft.fsdp.weight_gradient)")


def distinct(leaves: Sequence[Any]) -> list[int]:
    """Return the index of the first occurrence of each tensor among the leaves."""
    first: dict[int, int] = {}
    for number, each in enumerate(leaves):
        if isinstance(each, Tensor):
            first.setdefault(id(each), number)
    return [*first.values()]
