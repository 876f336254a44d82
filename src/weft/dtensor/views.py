"""Views of sharded tensors. A view stores its operators, not a copy of values.

w[:, :2].t()     stores the parent w and the steps, a slice and a transpose, without communication
reading it       gathers w and applies the steps, each time, so that values are never stale
writing to it    gathers w, applies the steps and writes; each rank then stores its part of w
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from weft.dtensor.uneven import RuledDTensor, UnevenDTensor, spec_of


class Step(NamedTuple):
    """One operator between a tensor and its view. `output`: the index of the result to use; None if the operator has
    only one result."""

    operator: Callable[..., Any]
    args: tuple
    kwargs: dict
    output: int | None


class ShardedView(RuledDTensor):
    """A view of a sharded tensor. Reading the view gathers the tensor. An in-place operator on the view also writes to
    the tensor. Both are collective; `repr` is not. `to_local()` raises RuntimeError, because writes to its result would
    be lost."""

    _parent: UnevenDTensor
    _steps: tuple[Step, ...]

    @classmethod
    def make(cls, parent: UnevenDTensor, steps: tuple[Step, ...], meta: torch.Tensor) -> "ShardedView":
        """Return the view that `steps` make of `parent`. `meta`: a tensor with the view's shape, strides and dtype."""
        mesh = parent._spec.mesh
        spec = spec_of(mesh, (Replicate(),) * mesh.ndim, meta.shape, meta.stride(), meta.dtype)
        with like_of(parent):
            nothing = torch.empty(0, dtype=meta.dtype, device=parent._local_tensor.device)
            made = cls(nothing, spec, requires_grad=False)  # type: ignore[call-arg]
        made._parent, made._steps = parent, steps
        return made

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The values, the same on all ranks; torch's code for DTensors reads them here. Collective."""
        return self.of(self._parent._gathered())

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        """Ignore the tensor that DTensor's constructor sets."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same view of `whole`, a plain tensor of the parent's shape."""
        for operator, args, kwargs, output in self._steps:
            result = operator(whole, *args, **kwargs)
            whole = result if output is None else result[output]
        return whole

    def replicated(self) -> DTensor:
        """Return the current values as a replicated DTensor. Collective."""
        return DTensor.from_local(self._local_tensor, self._spec.mesh, self._spec.placements, run_check=False)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        raise RuntimeError(
            f"to_local() of a view of shape {tuple(self.shape)} of a sharded tensor: a view has no local part, and "
            f"writes to a copy would be lost; read full_tensor(), and write to the view itself under torch.no_grad()"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        steps = ", ".join(str(step.operator) for step in self._steps)
        return f"ShardedView(shape={tuple(self.shape)}, of={tuple(self._parent.shape)}, by=[{steps}])"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.replicated().__reduce_ex__(protocol)


def like_of(tensor: torch.Tensor) -> AbstractContextManager:
    """Return a context in which new tensors can share the version counter of `tensor`, as its views do. Tensors made in
    inference mode have no version counter, so the context leaves this mode, unless `tensor` was made in it."""
    return torch.inference_mode(tensor.is_inference()) if torch.is_inference_mode_enabled() else nullcontext()


def decomposed(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the operators of which `func` consists, such as `_to_copy` for `to`. Only in inference mode does torch leave
    this to tensor subclasses."""
    return func.decompose(*args, **kwargs)


@cache
def is_view(func: Any) -> bool:
    """Return whether operator `func` returns views of its first argument, and writes to no argument."""
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def view_of(func: Any, args: tuple, kwargs: dict) -> ShardedView | list[ShardedView]:
    """Return the view or views that operator `func` makes of a sharded tensor or of a view. Does not communicate."""
    source = args[0]
    known = isinstance(source, ShardedView)
    parent: UnevenDTensor = source._parent if known else source
    steps: tuple[Step, ...] = source._steps if known else ()
    meta = torch.empty_strided(parent.shape, parent.stride(), dtype=parent.dtype, device="meta")
    results = func(source.of(meta) if known else meta, *args[1:], **kwargs)
    if isinstance(results, torch.Tensor):
        return ShardedView.make(parent, (*steps, Step(func, args[1:], kwargs, None)), results)
    return [
        ShardedView.make(parent, (*steps, Step(func, args[1:], kwargs, at)), each) for at, each in enumerate(results)
    ]


def parents_of(tensors: Sequence[torch.Tensor]) -> list[UnevenDTensor]:
    """Return the sharded tensors in `tensors`, and the parents of the views in `tensors`. Each appears once."""
    parents = [each._parent if isinstance(each, ShardedView) else each for each in tensors]
    return list({id(parent): parent for parent in parents if isinstance(parent, UnevenDTensor)}.values())
