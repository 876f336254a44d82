"""Placements of parameters, gradients and optimizer state: one per mesh axis.

    strategy              ZeRO   parameter    gradient     optimizer
    no_shard              0      Replicate    Partial      Replicate
    optim                 1      Replicate    Partial      Shard(0)
    optim_grads           2      Replicate    Shard(0)     Shard(0)
    optim_grads_params    3      Shard(0)     Shard(0)     Shard(0)

On a 2-D mesh (outer, shard) the table applies to the shard axis. The outer axis uses the row no_shard (HSDP)
or the row optim (HFSDP). HFSDP requires that the shard axis also shards the optimizer state.

A `Partial` gradient is reduced over its axis only after the last microbatch, a `Shard(0)` gradient after each one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

_ROWS: dict[str, tuple[Placement, Placement, Placement]] = {
    "no_shard": (Replicate(), Partial(), Replicate()),
    "optim": (Replicate(), Partial(), Shard(0)),
    "optim_grads": (Replicate(), Shard(0), Shard(0)),
    "optim_grads_params": (Shard(0), Shard(0), Shard(0)),
}
_OUTER_ROWS = ("no_shard", "optim")


@dataclass(frozen=True, init=False)
class Placements:
    """The placements of parameters, gradients and optimizer state. Each field has one placement per mesh axis, the
    outer axis first. Raises ValueError for a combination that matches no strategy."""

    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    def __init__(
        self,
        parameter: Placement | Sequence[Placement],
        gradient: Placement | Sequence[Placement],
        optimizer: Placement | Sequence[Placement],
    ) -> None:
        for name, value in (("parameter", parameter), ("gradient", gradient), ("optimizer", optimizer)):
            object.__setattr__(self, name, (value,) if isinstance(value, Placement) else tuple(value))
        axes = {len(self.parameter), len(self.gradient), len(self.optimizer)}
        if len(axes) > 1 or not axes & {1, 2}:
            raise ValueError(
                f"{self}: parameter, gradient and optimizer need one placement per mesh axis each, for one or two axes"
            )
        self._row(-1, tuple(_ROWS))
        if len(self.parameter) == 2:
            self._row(0, _OUTER_ROWS if self.optimizer[-1].is_shard() else ("no_shard",))

    def _row(self, axis: int, allowed: tuple[str, ...]) -> None:
        row = (self.parameter[axis], self.gradient[axis], self.optimizer[axis])
        if row not in [_ROWS[name] for name in allowed]:
            table = "; ".join(f"{name}: {', '.join(map(str, _ROWS[name]))}" for name in allowed)
            where = "shard" if axis else "outer"
            raise ValueError(
                f"(parameter, gradient, optimizer) = ({', '.join(map(str, row))}) on the {where} axis: "
                f"choose one of {table}"
            )

    @property
    def axes(self) -> int:
        """The number of mesh axes."""
        return len(self.parameter)

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether gradients are reduced over the shard axis after every backward, not only after the last of a step."""
        return self.gradient[-1].is_shard()


def placements_of(strategy: "str | Placements", outer_strategy: str, axes: int) -> Placements:
    """Return the placements on a mesh with `axes` axes. Raises ValueError for unknown strategies or combinations."""
    if isinstance(strategy, Placements):
        if outer_strategy != "no_shard":
            raise ValueError(
                f"outer_strategy={outer_strategy!r} together with {strategy}: the placements already define it; leave "
                f"it out"
            )
        if strategy.axes != axes:
            raise ValueError(
                f"{strategy} is for {strategy.axes} mesh axes, but the mesh has {axes}: pass one placement per axis"
            )
        return strategy
    if not isinstance(strategy, str) or strategy not in _ROWS:
        raise ValueError(f"strategy={strategy!r}: choose one of {', '.join(map(repr, _ROWS))} or weft.Placements(...)")
    if outer_strategy not in _OUTER_ROWS:
        raise ValueError(f"outer_strategy={outer_strategy!r}: choose one of {', '.join(map(repr, _OUTER_ROWS))}")
    if axes == 1:
        if outer_strategy != "no_shard":
            raise ValueError(
                f"outer_strategy={outer_strategy!r}: a 1-D mesh has no outer axis; pass a 2-D mesh (outer, shard)"
            )
        return Placements(*_ROWS[strategy])
    if outer_strategy == "optim" and strategy == "no_shard":
        raise ValueError(
            "outer_strategy='optim' with strategy='no_shard': the outer axis shards the parts of the shard axis "
            "further; choose 'optim' or a stronger strategy"
        )
    return Placements(*zip(_ROWS[outer_strategy], _ROWS[strategy]))
