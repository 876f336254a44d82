"""One captured function: its forward and its backward, and an autograd node that replays them.

    forward    inputs -> static inputs | replay | static outputs -> outputs
    backward   gradients of outputs -> static ones | replay | static gradients -> autograd

Between a forward and its backward a capture is busy: what is saved for the backward lies in memory that the next
forward writes to. Autograd adds the gradients of parameters up and leaves them in `.grad`, as it does for an
eager call. What writes gradients of weights itself is recorded once for each set of buffers (`weft.graphs.writes`).
Delayed gradients of weights are a recording of their own: a replayed backward queues it where an eager one queues
products, and the capture stays busy until it has run.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from weft.fsdp.gradients.direct import answering
from weft.fsdp.gradients.partial import entering, whole
from weft.graphs import tape
from weft.graphs.attributes import Attributes, has_hooks, nothing_drawn
from weft.graphs.capture import Backend, CaptureRefused, Delays
from weft.graphs.places import Places, Ranges, hooked, local, range_of, versions_set
from weft.graphs.watch import storage_of
from weft.graphs.writes import Recordings

POISON = False
"""For tests: fill what a capture computes before each replay, and all of it when its backward is done."""
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Sample(NamedTuple):
    """A tensor of an eager call that a static one is made like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Sample":
        """What is remembered of `tensor`."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def make(self) -> Tensor:
        """A tensor of zeros like it; what is expanded becomes contiguous, so that it can be written to."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if any(stride == 0 and size > 1 for size, stride in zip(self.shape, self.stride)):
            return torch.zeros(self.shape, **options)
        return torch.empty_strided(self.shape, self.stride, **options).zero_()


class Lease:
    """A forward in a capture, until its backward is done or its graph is gone. `queue`: takes what is delayed."""

    def __init__(self, captured: "Captured", queue: Delays | None) -> None:
        self._captured = captured
        self.queue = queue

    def end(self) -> None:
        """The backward is done: the capture may be used again."""
        if self._captured.holder() is self:
            self._captured.rest()


class Captured:
    """`function` captured with these arguments: flat `leaves`, and their `spec`.

    `places`: the parameters and buffers that the function may read. `gradients`: samples of the gradients of the
    differentiable outputs, in their order. `count`: is told why a backward is eager.
    `queue`: what the function runs under, if gradients of weights are delayed. Raises CaptureRefused.
    """

    def __init__(
        self,
        backend: Backend,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        spec: TreeSpec,
        places: Places,
        gradients: Sequence[Sample],
        count: Callable[[str], None],
        queue: Delays | None = None,
    ) -> None:
        self.ready = False
        """Whether all ranks have it."""
        self._count = count
        self._delays: Any = None if queue is None else queue.fresh()
        self._weights: Recordings | None = None
        spread: list[Any] = [each for each in places.tensors() if isinstance(each, DTensor)]
        if not all(map(places.is_owned, spread)):
            raise CaptureRefused("a weight of it is a DTensor that is in no unit")
        if any(map(hooked, places.tensors())):
            raise CaptureRefused("a hook on the gradient of a gathered weight would not run")
        if any(map(has_hooks, places.modules[1:])):
            raise CaptureRefused("a module inside of it has hooks, which a replay would not run")
        self.addresses = places.addresses()
        self._places = places
        self._holder: weakref.ref[Lease] | None = None
        self._numbers = distinct(leaves)
        tensors = [leaves[number] for number in self._numbers]
        self._inputs = [Sample.of(each).make() for each in tensors]
        with torch.no_grad():
            for static, tensor in zip(self._inputs, tensors):
                static.copy_(tensor)
        self._gradients = [sample.make() for sample in gradients]
        self._entered: list[tuple[Any, DeviceMesh]] = []
        """Weights whose gradients are summed over ranks behind a replay, once for each use."""
        self.python = Attributes(places.modules)
        try:
            with places.restored(), nothing_drawn():
                self._capture(backend, function, leaves, spec)
        finally:
            changed = self.python.difference()
            self.python.restore()
        if changed is not None:
            raise CaptureRefused(f"it sets attributes of its modules, which a replay would not ({changed})")

    def _capture(self, backend: Backend, function: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec) -> None:
        tensors = [leaves[number] for number in self._numbers]
        entered = [each.detach().requires_grad_(tensor.requires_grad) for each, tensor in zip(self._inputs, tensors)]
        versions = [each._version for each in entered]
        statics = {id(tensor): static for tensor, static in zip(tensors, entered)}
        arguments = [statics.get(id(each), each) for each in leaves]
        known = [*map(range_of, self._inputs), *self._places.ranges()]

        alike: list[Tensor] = []

        def enter(parameter: Any, mesh: DeviceMesh) -> Tensor:
            tensor = local(parameter).detach().requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                self._entered.append((parameter, mesh))
                alike.append(tensor)
            return tensor

        def forward() -> Any:
            alike.clear()  # a backend may run it twice
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
        with answering(_refuse), entering(enter):
            result, self._forward = backend.capture(forward, known)
        self._changed = [each for each, version in zip(buffers, before) if each._version != version]
        """Buffers that the forward changes."""
        if [each._version for each in entered] != versions:
            raise CaptureRefused("it changes an input in place")
        results, self._spec = tree_flatten(result)
        for value in results:
            if not isinstance(value, (Tensor, *_CONSTANTS)):
                raise CaptureRefused(f"it returns a {type(value).__name__}, which a replay cannot make")
        outputs = [each for each in results if isinstance(each, Tensor)]
        differentiable = [each for each in outputs if each.requires_grad]
        if not differentiable:
            raise CaptureRefused("nothing in it needs a gradient")
        if len(differentiable) != len(self._gradients):
            raise CaptureRefused("some of its outputs get gradients and others do not")
        inputs = [each for each in entered if each.requires_grad]
        trained = self._places.trained()
        known += [*self._forward.memory(), *map(range_of, self._gradients), *map(range_of, outputs)]

        # Retained: a further backward must find what this one read. It runs when replays have written to all that
        # autograd saved; the forward before it has made the values.
        saved = [*self._places.tensors(), *map(local, self._places.tensors()), *entered]
        at_capture = [each._version for each in saved]
        # Edges, not tensors: given tensors, `grad` leaves function modes, and a checkpoint inside computes again under
        # those of its forward.
        ends, wanted = (
            [get_gradient_edge(each) for each in them] for them in (differentiable, [*inputs, *alike, *trained])
        )

        def differentiate() -> Sequence[Tensor | None]:
            if self._delays is not None:
                self._delays.forget()
            with versions_set(saved, at_capture), self._delays or nullcontext():
                return torch.autograd.grad(ends, wanted, self._gradients, retain_graph=True, allow_unused=True)

        def capture(function: Callable[[], Any], may_write: Ranges) -> tuple[Any, Any]:
            return backend.capture(function, [*known, *may_write], self._forward)

        self._backward = Recordings(capture, differentiate, trained, self._places.restored, self._count)
        self._needs = [each.requires_grad for each in entered]
        made = self._backward.tried.result[len(inputs) + len(alike) :]
        self.parameters = [to for to, gradient in zip(trained, made) if gradient is not None]
        """Those that get gradients by autograd."""
        self._owned = [self._places.is_owned(each) for each in trained]
        self._results = [each.data if isinstance(each, Tensor) else each for each in results]
        self._differentiable = [each.requires_grad for each in outputs]
        if self._delays is not None and self._delays.queued:
            if self._backward.writes:
                raise CaptureRefused("some of its gradients of weights are delayed, and it writes others itself")
            known += self._backward.tried.recording.memory()
            delayed = self._delays.repeatable()
            self._weights = Recordings(capture, delayed, [], self._places.restored, self._count)
        later = [each.tried.recording.reads for each in (self._backward, self._weights) if each is not None]
        self._saved = [any(storage_of(each) in reads for reads in later) for each in outputs]
        """Which outputs a backward reads."""

    @property
    def nbytes(self) -> int:
        """The memory of what it computes, and of what is copied into it."""
        statics = sum(each.untyped_storage().nbytes() for each in (*self._inputs, *self._gradients))
        delayed = 0 if self._weights is None else self._weights.nbytes
        return statics + self._forward.nbytes + self._backward.nbytes + delayed

    def holder(self) -> Lease | None:
        """The forward in flight."""
        return None if self._holder is None else self._holder()

    def run(self, leaves: Sequence[Any], *, copies: bool, queue: Delays | None = None) -> Any:
        """The function's result. `copies`: it stays as it is when the next replay writes to the static outputs.
        `queue`: what the function runs under."""
        lease = Lease(self, queue)
        self._holder = weakref.ref(lease)
        inputs = [leaves[number] for number in self._numbers]
        alike = [whole(parameter, mesh) for parameter, mesh in self._entered]
        made = iter(_Replayed.apply(self, lease, copies, *inputs, *alike, *self.parameters))
        return tree_unflatten([next(made) if isinstance(each, Tensor) else each for each in self._results], self._spec)

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], *, copies: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Replay the forward: all outputs, and those of them that are not differentiable."""
        if POISON:
            self._forward.poison()
        for static, given in zip(self._inputs, inputs):
            static.copy_(given)
        self._forward.replay()
        outputs = [each for each in self._results if isinstance(each, Tensor)]
        # Autograd refuses what was saved of these before. A graph of CUDA changes them behind its back.
        torch.autograd.graph.increment_version(self._changed if copies else [*self._changed, *outputs])
        outputs = [each.clone() if copies else each.detach() for each in outputs]
        return outputs, [each for each, needs in zip(outputs, self._differentiable) if not needs]

    @torch.no_grad()
    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward: gradients of the inputs, None for those without, of what is summed over ranks behind it,
        and of the parameters."""
        if self._places.addresses() != self.addresses:
            raise RuntimeError(
                "weights of a captured function have moved, or were frozen, between its forward and its backward: "
                "leave its module out of weft.Graphs"
            )
        wanted = [each for each, needs in zip(gradients, self._differentiable) if needs]
        for static, gradient in zip(self._gradients, wanted):
            if gradient is None:
                static.zero_()
            else:
                static.copy_(gradient)
        found = self._backward.run(poisoned=POISON)
        # The caller may keep the gradient of an input. Those of sharded parameters are copied at the end of their
        # unit's backward, before the next replay.
        of_inputs = iter(found)
        handed: list[Tensor | None] = []
        for needs in self._needs:
            gradient = next(of_inputs) if needs else None
            handed.append(None if gradient is None else gradient.clone())
        handed += [next(of_inputs) for _ in self._entered]  # copied as soon as this backward ends
        pairs = [(each, owned) for each, owned in zip(of_inputs, self._owned) if each is not None]
        return [*handed, *(each.detach() if owned else each.clone() for each, owned in pairs)]

    def read_later(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of the outputs that the backward reads."""
        return [each for each, saved in zip(outputs, self._saved) if saved]

    def delay(self, lease: "Lease", *, ends: bool) -> bool:
        """Queue the rest of the backward, if there is one that was delayed; `ends`: the lease ends with it."""
        if self._weights is None:
            return False
        weights = self._weights

        def run() -> None:
            weights.run(poisoned=POISON)
            if ends:
                lease.end()

        assert lease.queue is not None
        lease.queue.add(run)
        return True

    def rest(self) -> None:
        """No forward is in flight."""
        self._holder = None
        if POISON:
            with torch.no_grad():
                for each in (*self._inputs, *self._gradients):
                    tape.poison(each)
            self._forward.poison()


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: Captured, lease: Lease, copies: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.captured, ctx.lease = captured, lease
        ctx.set_materialize_grads(False)
        outputs, constant = captured.forward(tensors, copies=copies)
        saved = [] if copies else captured.read_later(outputs)
        ctx.save_for_backward(*captured.parameters, *saved)  # autograd refuses those that were written to
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through a captured module: a replayed backward has no graph; leave the module out "
                "of weft.Graphs"
            )
        ctx.saved_tensors  # noqa: B018
        found = ctx.captured.backward(gradients)
        ends = not torch._C._autograd._get_current_graph_task_keep_graph()
        if not ctx.captured.delay(ctx.lease, ends=ends) and ends:
            ctx.lease.end()
        return (None, None, None, *found)


def _refuse(parameter: nn.Parameter) -> Any:
    raise CaptureRefused("a forward in it asks for gradients of weights (weft.fsdp.weight_gradient)")


def distinct(leaves: Sequence[Any]) -> list[int]:
    """Where each tensor stands first among the leaves."""
    first: dict[int, int] = {}
    for number, each in enumerate(leaves):
        if isinstance(each, Tensor):
            first.setdefault(id(each), number)
    return [*first.values()]
