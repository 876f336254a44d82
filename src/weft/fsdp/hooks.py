"""The hook driver: a module's forward and backward drive its unit.

    forward   before  acquire; the inputs' gradients mark the end of this call's backward
              after   release, or keep until backward; the outputs' gradients mark the beginning of this call's backward
    backward  begin   acquire
              end     reduce, release
              over    (once per backward, by the runtime) end the calls that no hook has ended, compare the ranks'
                      collectives, wait for reductions, publish gradients

A backward with `create_graph=True` records a graph, as a forward does. A second backward through this graph begins at
the gradients of the call's inputs, and needs the weights until it reaches these inputs.

A forward inside a backward is usually a recomputation by activation checkpointing. If the unit's own backward is still
to come, the weights are kept for it. If it has begun, the weights are held already, and the hooks only cast inputs and
outputs. The hooks also only cast while a schedule drives the units.
"""

import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import forward_ad

from weft.comm.ranges import Stretch, observed
from weft.fsdp.driver import RETURNED, UNTIL_BACKWARD, UNTIL_RESHARD, USER, Engine, Hold, in_backward
from weft.fsdp.trees import give_back, map_tensors, tensors_in
from weft.fsdp.unit import Unit
from weft.weak import alive


class ForwardCall:
    """One forward of a unit, with its backward. The object holds the unit's weights during that backward."""

    computes = backward = True

    def __init__(self, driver: "HookDriver", engine: Engine) -> None:
        self.driver = driver
        self.unit = driver.unit
        self.begun = False  # whether its backward is under way
        self._retained = False  # whether autograd keeps the graph for another backward
        self._ended_in = -1  # the id of autograd's graph task in which this call's backward last ended
        self._moves = self.unit.moves  # at the forward; after further moves, a retained graph has invalid views
        self._engine = engine  # a strong reference: the root may be freed before the backward
        self._stretch: Stretch | None = None
        self._known = weakref.ref(self, self.unit.calls.discard)
        self.unit.calls.add(self._known)
        self.unit.stopped = False

    @property
    def name(self) -> str:
        return f"a backward of {self.unit}"

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        """Begin the call's backward. This is a hook on the gradient of each output. It has no effect while the call's
        backward is under way."""
        if self.begun:
            return
        unit, driver = self.unit, self.driver
        if self._known not in unit.calls:  # a second backward through a retained graph
            if unit.moves != self._moves:
                raise RuntimeError(
                    f"backward of {unit} runs again through a retained graph, but its gathered weights have moved "
                    "since: pass runtime=weft.RuntimeOptions(allocator='caching') to the root"
                )
            unit.calls.add(self._known)
        engine = self._engine = driver.engine
        engine.begin_backward(self)
        self.begun = True
        self._retained = torch._C._autograd._get_current_graph_task_keep_graph()
        if observed():
            self._stretch = Stretch(unit.name, "backward")
        driver.backwards += 1
        if unit.unshard_in_backward:
            engine.use(unit, self, driver.backward_prefetch and alive(driver.backward_prefetch))
        engine.offer(unit)

    def begin_inside(self, gradient: torch.Tensor) -> None:
        """Begin the call's backward, unless the running backward has ended it already. This is a hook for an output
        that is a view. It is on the view's base, because the view's own hook does not run if the caller wrote to the
        view in place."""
        if self._ended_in != torch._C._current_graph_task_id():
            self.begin()

    def reach_inputs(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """End the call's backward, now that autograd has computed the gradients of the call's inputs."""
        if not self.begun and self.unit.awaits_reduction:
            self.begin()
        if torch.is_grad_enabled():
            for gradient in gradients:
                if gradient is not None and gradient.requires_grad:
                    gradient.register_hook(self.begin)
        self.end()

    def end(self) -> None:
        """End the call's backward."""
        self._ended_in = torch._C._current_graph_task_id()
        if not self.begun:
            return
        self.abandon()
        unit, engine = self.unit, self._engine
        engine.ready(unit)
        if unit.reshard_after_backward:
            if len(unit.holders) > 1 or self not in unit.holders:
                unit.end_holds(UNTIL_BACKWARD, USER)
        elif self in unit.holders:
            engine.keep(unit, UNTIL_RESHARD)
        if self in unit.holders:
            engine.done(unit, self)

    def abandon(self) -> None:
        """Mark the call's backward as not begun."""
        if self.begun:
            self.begun = False
            self.driver.backwards -= 1
            if self._stretch is not None:
                self._stretch.end()
            if not self._retained:
                self.unit.calls.discard(self._known)


class _EndOfBackward(torch.autograd.Function):
    """The identity on a call's differentiable inputs. Its backward marks the end of the call's backward."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.materialize_grads = False  # an unused input has no gradient, instead of one of zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call.reach_inputs(gradients)
        return (None, *gradients)


_mark: Callable[..., Any] = super(torch.autograd.Function, _EndOfBackward).apply
"""`Function.apply` without its handling of torch.func, under which units raise anyway."""


class HookDriver:
    """The code that runs around the calls of one unit's modules. torch.compile does not trace it. `engine`: the engine
    of the model; it is made when it is first needed."""

    engine: Engine

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.forward_prefetch: list[weakref.ref[Any]] | None = None
        self.backward_prefetch: list[weakref.ref[Any]] | None = None
        self.backwards = 0  # the number of the unit's backwards under way. A forward during one is a recomputation.
        self._entered: set[int] = set()  # the ids of the unit's modules that the current forward has called
        self._call: ForwardCall | None = None  # the current forward, if autograd records it
        self._hold = Hold(f"a forward of {unit.kind}")
        self._stretch: Stretch | None = None

    @torch.compiler.disable(recursive=False)
    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run `forward(*args, **kwargs)` of `module` with the unit's gathered weights."""
        engine = self.engine
        compiled = get_eval_frame_callback() is not None  # torch.compile would trace this code
        args, kwargs, finish = (self._enter_plainly if compiled else self._enter)(engine, module, args, kwargs)
        if finish is None:
            return self.unit.policy.cast_output(forward(*args, **kwargs))
        try:
            output = forward(*args, **kwargs)
        except BaseException as error:
            self._fail(engine, error)
            if _EndOfBackward.__name__ in str(error):
                raise RuntimeError(
                    f"{self.unit} modifies its input in place, which autograd forbids for a unit's input: pass a "
                    f"clone(), or make the first operation out of place, such as ReLU(inplace=False)"
                ) from error
            raise
        return (self._finish_plainly if compiled else self._finish)(engine, output, finish)

    def _enter(self, engine: Engine, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Prepare a forward. Return its inputs, cast and passed through `_EndOfBackward`, and a function to call after
        the forward. If hooks only cast in this call, return the cast inputs, and None instead of a function."""
        if engine.recover() or self.backwards or id(module) in self._entered:
            return *self.unit.policy.cast_inputs((args, kwargs)), None
        traced = torch._C._get_tracing_state() is not None
        if traced or torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            what = "torch.jit.trace" if traced else "torch.func or forward-mode differentiation"
            raise RuntimeError(
                f"{self.unit} is called under {what}: weights are gathered only around plain calls. Transform a plain "
                "copy of the module, or a part of it that is not sharded"
            )
        unit = self.unit
        engine.begin_forward(unit)
        try:
            if not self._entered:
                if observed():
                    self._stretch = Stretch(unit.name, "forward")
                engine.use(unit, self._hold, self.forward_prefetch and alive(self.forward_prefetch))
            args, kwargs = unit.policy.cast_inputs((args, kwargs))
            finish = _nothing
            if self._call is None and torch.is_grad_enabled():  # the backward of the call ends at these inputs
                self._call = ForwardCall(self, engine)
                args, kwargs, finish = _marked(self._call, args, kwargs)
            self._entered.add(id(module))
            return args, kwargs, finish
        except BaseException as error:
            self._fail(engine, error)
            raise

    def _finish(self, engine: Engine, output: Any, finish: Callable[[], None]) -> Any:
        """Complete a forward and return its output; after the last of the unit's modules, release or keep weights."""
        try:
            if finish is not _nothing:
                finish()
            output = self._marked_output(output)
            # A recomputation may call only some of the unit's modules. Each of them is then a separate call.
            if len(self._entered) == len(self.unit.modules) or (self._call is not None and in_backward()):
                self._leave(engine)
        except BaseException as error:
            self._fail(engine, error)
            raise
        engine.end_forward()
        return output

    _enter_plainly = torch.compiler.disable(_enter)
    _finish_plainly = torch.compiler.disable(_finish)

    @torch.compiler.disable
    def _fail(self, engine: Engine, error: BaseException) -> None:
        """Clean up after `error`, raised by a forward or by the code around it."""
        engine.note_failure(f"the forward of {self.unit.name or 'the root'}", error)
        if self._call is not None and not in_backward():  # activation checkpointing may stop a recomputation early
            self.unit.stopped = True
        try:
            self.abandon()
        finally:
            engine.end_forward(error)

    def _marked_output(self, output: Any) -> Any:
        """Cast the output, and register hooks on its gradients. Raise an error for views of weights that will be freed,
        and for outputs that compute when they are read, such as generators."""
        if not isinstance(output, torch.Tensor) and isinstance(output, _LAZY):
            raise TypeError(
                f"forward of {self.unit.kind} returned a {type(output).__name__}, which computes when it is read, "
                f"after the weights are freed: return a list"
            )
        output = self.unit.policy.cast_output(output)
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output, hidden=True):
            if self.unit.lends(tensor):
                if self._reshards():
                    raise RuntimeError(
                        f"{self.unit} returned a view of its gathered weights, which are freed when its forward ends: "
                        f"return a clone(), or pass reshard_after_forward=False"
                    )
                if self._call is None:  # otherwise `_call` holds the weights
                    self.engine.keep(self.unit, RETURNED)
            if self._call is not None and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._call.begin)
                base = tensor._base
                if base is not None and base.requires_grad and not base.is_leaf:
                    base.register_hook(self._call.begin_inside)
        return output

    def abandon(self) -> None:
        """End the unit's forward, if one has begun, even if some modules of the unit have not run in it."""
        if self._entered:
            self._leave(self.engine)
        elif self._hold in self.unit.holders:  # the forward failed before any module began
            self._call = None
            self.engine.done(self.unit, self._hold)
        if self._stretch is not None:
            self._stretch.end()

    def _leave(self, engine: Engine) -> None:
        if self._stretch is not None:
            self._stretch.end()
        unit = self.unit
        call, self._call = self._call, None
        self._entered.clear()
        recomputing = in_backward()
        if call is not None and (recomputing or not self._reshards()):
            engine.keep(unit, UNTIL_BACKWARD)
        elif not recomputing and len(unit.holders) > 1:
            unit.end_holds(UNTIL_BACKWARD, USER)
        if self._hold in unit.holders:
            engine.done(unit, self._hold, backward_follows=call is not None)

    def _reshards(self) -> bool:
        choice = self.unit.reshard_after_forward
        return self.unit.number > 0 if choice is None else choice  # the root's backward follows immediately


def _marked(call: ForwardCall, args: tuple, kwargs: dict) -> tuple[tuple, dict, Callable[[], None]]:
    """Return the inputs with their differentiable tensors passed through `_EndOfBackward`, and a function to call after
    the forward. Lists and dicts with such tensors are rebuilt; the function copies the module's changes of them to the
    originals."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return (_mark(call, *args) if _can_be_marked(args[0]) else args), kwargs, _nothing
    tensors = [*filter(_can_be_marked, tensors_in((*args, *kwargs.values())))]
    if not tensors:
        return args, kwargs, _nothing
    marks = _mark(call, *tensors)
    marked = {id(tensor): mark for tensor, mark in zip(tensors, marks)}
    rebuilt: list[tuple[Any, Any]] = []

    def mark(value: Any) -> Any:
        return map_tensors(lambda tensor: marked.get(id(tensor), tensor), value, rebuilt=rebuilt)

    args, kwargs = tuple(map(mark, args)), {name: mark(value) for name, value in kwargs.items()}
    if not rebuilt:
        return args, kwargs, _nothing
    original = {id(new): old for old, new in [*zip(tensors, marks), *rebuilt]}
    return args, kwargs, lambda: give_back(rebuilt, original)


def _can_be_marked(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.layout in (torch.strided, torch.jagged)  # sparse ones have no views


def _nothing() -> None: ...


_LAZY = (Iterator, Coroutine, AsyncIterator)
