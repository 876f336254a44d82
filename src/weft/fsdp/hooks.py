"""The hook driver: a module's forward and backward drive its unit.

    forward   before  acquire, note the inputs' gradients as the end of this call's backward
              after   release, or keep where the weights stay until backward; note the outputs' gradients as its begin
    backward  begin   acquire
              end     release, reduce
              over    (once per backward, by the runtime) complete calls whose end has no hook, collect, check, publish

A backward that is differentiated itself is like a forward: a backward through it begins at the gradients of the call's
inputs, and needs the weights until the call's own end.

A forward inside a backward is a recomputation by activation checkpointing. If the unit's own backward is under way, its
weights are held and the hooks stand back; if that backward is still to come, the weights are kept for it. Hooks stand
back as well while a schedule drives the units.
"""

import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weft.comm.ranges import Stretch
from weft.fsdp.runtime.runtime import in_backward
from weft.fsdp.trees import map_tensors, tensors_in
from weft.fsdp.unit import Unit


class ForwardCall:
    """One forward of a unit, on its way through backward."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._begun = False
        self._retained = False
        self._holds = False
        self._moves = unit.moves
        self._stretch = Stretch()
        unit.calls.add(self)

    @property
    def begun(self) -> bool:
        """Whether its backward is under way."""
        return self._begun

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        """The first output's gradient has come."""
        if self._begun:
            return
        self._begun = True
        self._retained = torch._C._autograd._get_current_graph_task_keep_graph()
        unit = self.unit
        if self not in unit.calls:  # a second backward through a retained graph
            if unit.moves != self._moves:
                raise RuntimeError(
                    f"backward of {unit.name or 'the root'} runs again through a retained graph, but its gathered "
                    "weights have moved since: pass runtime=weft.RuntimeOptions(allocator='caching') to the root"
                )
            unit.calls.add(self)
        unit.runtime.begin_backward(self)
        self._stretch.begin(unit.name, "backward")
        unit.backwards += 1
        self._holds = unit.unshard_in_backward
        if self._holds:
            unit.runtime.passes.visit(unit, unit.backward_prefetch)
        unit.offer_main_gradients()

    def reach_inputs(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """The inputs' gradients are done."""
        unit = self.unit
        if not self._begun and unit.awaits_reduction:
            if not unit.held:
                raise RuntimeError(
                    f"backward came into {unit.name or 'the root'} ({unit.kind}) through a tensor that its forward did "
                    "not return, when its weights were gone: return that tensor too, in whatever structure"
                )
            self.begin()
        if torch.is_grad_enabled():
            for gradient in gradients:
                if gradient is not None and gradient.requires_grad:
                    gradient.register_hook(self.begin)
        self.end()

    def end(self) -> None:
        """The last input's gradient is done; for a call without differentiable inputs, the whole backward is."""
        if not self._begun:
            return
        self._begun = False
        unit = self.unit
        if not self._retained:
            unit.calls.discard(self)
        unit.backwards -= 1
        self._stretch.end()
        unit.reduce()
        if unit.reshard_after_backward:
            unit.drop()
        elif self._holds:
            unit.keep()
        if self._holds:
            unit.release()


class _EndOfBackward(torch.autograd.Function):
    """The identity on a call's differentiable inputs; its backward runs when the call's is done."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)  # an input that nothing used has no gradient, not one of zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call.reach_inputs(gradients)
        return (None, *gradients)


class HookDriver:
    """What runs around the calls of one unit's modules, outside of anything compiled in them."""

    def __init__(self, unit: Unit, modules: int) -> None:
        self.unit = unit
        unit.driver = weakref.ref(self)
        self._modules = modules
        self._entered: set[int] = set()
        self._call: ForwardCall | None = None
        self._stretch = Stretch()

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`forward(*args, **kwargs)` of `module` with the unit's weights."""
        if self.unit.backwards or id(module) in self._entered or self.unit.runtime.in_schedule:
            args, kwargs = self.unit.policy.cast_inputs((args, kwargs))
            return self.unit.policy.cast_output(forward(*args, **kwargs))
        try:
            args, kwargs = self._before(module, args, kwargs)
            return self._after(forward(*args, **kwargs))
        except BaseException as error:
            self.unit.runtime.failed(f"the forward of {self.unit.name or 'the root'}", error)
            self.let_go()
            raise
        finally:
            self.unit.runtime.leave_forward()

    @torch.compiler.disable
    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Acquire; returns the inputs, cast and marked."""
        unit, runtime = self.unit, self.unit.runtime
        runtime.enter_forward(unit)
        if not self._entered:
            self._stretch.begin(unit.name, "forward")
            runtime.passes.visit(unit, unit.forward_prefetch)
            self._call = ForwardCall(unit) if torch.is_grad_enabled() else None
        args, kwargs = unit.policy.cast_inputs((args, kwargs))
        if self._call is not None and not self._entered:  # backward ends where forward began
            args, kwargs = _marked(self._call, (args, kwargs))
        self._entered.add(id(module))
        return args, kwargs

    @torch.compiler.disable
    def _after(self, output: Any) -> Any:
        """Release or keep, if this was the last of the unit's modules; returns the output, cast and marked."""
        if isinstance(output, _LAZY):
            raise TypeError(
                f"forward of {self.unit.kind} returned a {type(output).__name__}, which computes when it is read, and "
                "the weights are gone by then: return a list"
            )
        output = self.unit.policy.cast_output(output)
        passing = self._reshards()
        for tensor in tensors_in(output, hidden=True):
            if passing and self.unit.lends(tensor):
                raise RuntimeError(
                    f"{self.unit.name or 'the root'} ({self.unit.kind}) returned a view of its gathered weights, which "
                    "go when its forward ends: return a clone(), or pass reshard_after_forward=False"
                )
            if self._call is not None and tensor.requires_grad:
                tensor.register_hook(self._call.begin)
        if len(self._entered) == self._modules:
            self.let_go()
        return output

    def let_go(self) -> None:
        """The unit's forward, if it is in one, is over: all its modules ran, or the rest will not."""
        self._stretch.end()
        if not self._entered:
            return
        unit = self.unit
        call, self._call = self._call, None
        self._entered.clear()
        recomputing = in_backward()
        if call is not None and (recomputing or not self._reshards()):
            unit.keep()
        elif not recomputing:
            if call is not None:
                unit.leave_pieces()
            unit.drop()
        unit.release()
        if call is not None and not recomputing:
            unit.runtime.passes.finish(unit)

    def _reshards(self) -> bool:
        """Whether the weights go after forward: by default not those of the root, whose backward follows at once."""
        choice = self.unit.reshard_after_forward
        return self.unit.number > 0 if choice is None else choice


def _marked(call: ForwardCall, inputs: Any) -> Any:
    """`inputs` with their differentiable tensors passed through the end-of-backward mark."""
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    if not tensors:
        return inputs
    marked = {id(tensor): mark for tensor, mark in zip(tensors, _EndOfBackward.apply(call, *tensors))}
    return map_tensors(lambda tensor: marked.get(id(tensor), tensor), inputs)


_LAZY = (Iterator, Coroutine, AsyncIterator)
