"""Views of sharded tensors: what was asked of the tensor, not a copy of what it held.

w[:, :2].t()     parent w, steps (slice, slice, transpose); nothing is communicated
reading it       gathers w and takes the steps on that, each time: it is never stale
writing to it    gathers w, takes the steps, writes; every rank then keeps its own part of w
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from weft.dtensor.uneven import RuledDTensor, UnevenDTensor, spec_of


class Step(NamedTuple):
    """One operator on the way from a tensor to a view of it; `output`: which of its results, None for the only one."""

    operator: Callable[..., Any]
    args: tuple
    kwargs: dict
    output: int | None

    def of(self, tensor: torch.Tensor) -> Any:
        """The view of `tensor`, a plain one."""
        result = self.operator(tensor, *self.args, **self.kwargs)
        return result if self.output is None else result[self.output]


class ShardedView(RuledDTensor):
    """A view of a sharded tensor. Reading gathers the tensor; an in-place operator also writes it back.

    Both are collective: all ranks do them together, and `repr` does neither. Raises RuntimeError for `to_local()`:
    what it gave would be a copy, and writes to it lost.
    """

    _parent: UnevenDTensor
    _steps: tuple[Step, ...]

    @classmethod
    def make(cls, parent: UnevenDTensor, steps: tuple[Step, ...], meta: torch.Tensor) -> "ShardedView":
        """The view of `parent` that `steps` lead to; `meta`: one of its shape, strides and dtype."""
        mesh = parent._spec.mesh
        spec = spec_of(mesh, (Replicate(),) * mesh.ndim, meta.shape, meta.stride(), meta.dtype)
        nothing = torch.empty(0, dtype=meta.dtype, device=parent._local_tensor.device)
        made = cls(nothing, spec, requires_grad=False)  # type: ignore[call-arg]
        made._parent, made._steps = parent, steps
        return made

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        """Its values, which are the same on all ranks, as torch's code for DTensors reads them. Collective."""
        return self.of(self._parent._gathered())

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        """What a DTensor is built with: here nothing."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of `whole`, a plain tensor of the parent's shape."""
        for step in self._steps:
            whole = step.of(whole)
        return whole

    def replicated(self) -> DTensor:
        """Its values now. Collective."""
        return DTensor.from_local(self._local_tensor, self._spec.mesh, self._spec.placements, run_check=False)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Refused."""
        raise RuntimeError(
            f"to_local() of a view of shape {tuple(self.shape)} of a sharded tensor: it has no part here, and what is "
            "written to a copy would be lost; read full_tensor(), and write to the view itself under torch.no_grad()"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        steps = ", ".join(str(step.operator) for step in self._steps)
        return f"ShardedView(shape={tuple(self.shape)}, of={tuple(self._parent.shape)}, by=[{steps}])"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `torch.save` writes: the values. Collective."""
        return self.replicated().__reduce_ex__(protocol)


@cache
def is_view(func: Any) -> bool:
    """Whether operator `func` gives tensors that share the memory of its first argument, and changes nothing."""
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def view_of(func: Any, args: tuple, kwargs: dict) -> ShardedView | list[ShardedView]:
    """What the operator `func`, which is a view, gives for a sharded tensor or a view of one. Communicates nothing."""
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
    """The sharded tensors among `tensors`, and those that views among them are of, each once."""
    parents = [each._parent if isinstance(each, ShardedView) else each for each in tensors]
    return list({id(parent): parent for parent in parents if isinstance(parent, UnevenDTensor)}.values())
