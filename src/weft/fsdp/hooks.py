"""The hook driver: a module's forward and backward drive its unit.

    forward   pre    acquire, note the inputs' gradients as the end of this call's backward
              post   release, or keep where the weights stay until backward; note the outputs' gradients as its begin
    backward  begin  acquire
              end    release, reduce
              over   (once per backward, by the runtime) complete calls whose end has no hook, collect, check, publish

A forward inside a backward is a recomputation by activation checkpointing. If the unit's own backward is under way, its
weights are held and the hooks stand back; if that backward is still to come, the weights are kept for it.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.fsdp.precision import cast_floating
from weft.fsdp.unit import Unit


class ForwardCall:
    """One forward of a unit, on its way through backward."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._begun = False
        self._moves = unit.moves
        unit.calls.add(self)

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        """The first output's gradient has come."""
        if self._begun:
            return
        self._begun = True
        unit = self.unit
        if self not in unit.calls:  # a second backward through a retained graph
            if unit.moves != self._moves:
                raise RuntimeError(
                    f"backward of {unit.name or 'the root'} runs again through a retained graph, but its gathered "
                    "weights have moved since: pass runtime=weft.RuntimeOptions(allocator='caching') to the root"
                )
            unit.calls.add(self)
        unit.runtime.begin_backward(self)
        unit.backwards += 1
        with record_function(f"weft/{unit.name}/backward"):
            unit.runtime.visit(unit, unit.backward_prefetch)

    def end(self) -> None:
        """The last input's gradient is done; for a call without differentiable inputs, the whole backward is."""
        if not self._begun:
            return
        self._begun = False
        unit = self.unit
        unit.calls.discard(self)
        unit.backwards -= 1
        unit.reduce()
        if unit.reshard_after_backward:
            unit.drop()
        else:
            unit.keep()
        unit.release()


class _EndOfBackward(torch.autograd.Function):
    """The identity on a call's differentiable inputs; its backward runs when the call's is done."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: torch.Tensor) -> Any:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call.end()
        return (None, *gradients)


class HookDriver:
    """The forward hooks of one unit, whose modules run as one."""

    def __init__(self, unit: Unit, modules: list[nn.Module]) -> None:
        self.unit = unit
        self._entered: list[int] = []
        self._modules = len(modules)
        self._call: ForwardCall | None = None
        for module in modules:
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=True)

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Acquire; returns the inputs, cast and marked."""
        unit = self.unit
        recomputing = torch._C._current_graph_task_id() != -1
        if unit.backwards:
            return unit.policy.cast_inputs((args, kwargs))
        runtime = unit.runtime
        if not self._entered:
            if not runtime.in_forward and not recomputing:
                runtime.begin_forward(torch.is_grad_enabled())
            runtime.in_forward += 1
            with record_function(f"weft/{unit.name}/forward"):
                runtime.visit(unit, unit.forward_prefetch)
            self._call = ForwardCall(unit) if torch.is_grad_enabled() else None
        self._entered.append(id(module))
        args, kwargs = unit.policy.cast_inputs((args, kwargs))
        if self._call is not None:
            args, kwargs = _marked(self._call, (args, kwargs))
        return args, kwargs

    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Release or keep; returns the output, cast and marked. Runs after an exception too, with no output."""
        unit = self.unit
        output = cast_floating(output, unit.policy.output_dtype)
        if id(module) not in self._entered:
            return output
        call = self._call
        if call is not None:
            for leaf in tree_flatten(output)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(call.begin)
        if output is not None and len(set(self._entered)) < self._modules:
            return output  # the rest of the unit's modules are still to come
        self._entered.clear()
        self._call = None
        runtime = unit.runtime
        runtime.in_forward -= 1
        recomputing = torch._C._current_graph_task_id() != -1
        if call is not None and (recomputing or not self._reshards(runtime.in_forward == 0)):
            unit.keep()
        elif not recomputing:
            unit.drop()
        unit.release()
        if call is not None and not recomputing:
            runtime.finish(unit)
        if not runtime.in_forward and not recomputing:
            runtime.end_forward()
        return output

    def _reshards(self, outermost: bool) -> bool:
        choice = self.unit.reshard_after_forward
        return not outermost if choice is None else choice


def _marked(call: ForwardCall, inputs: Any) -> Any:
    """`inputs` with their differentiable tensors passed through the end-of-backward mark."""
    leaves, structure = tree_flatten(inputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if places:
        for place, tensor in zip(places, _EndOfBackward.apply(call, *(leaves[i] for i in places))):
            leaves[place] = tensor
    return tree_unflatten(leaves, structure)
