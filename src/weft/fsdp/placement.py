"""What lies where: one placement per mesh axis for parameters, gradients and optimizer state.

    strategy              ZeRO   parameter    gradient     optimizer
    no_shard              0      Replicate    Partial      Replicate
    optim                 1      Replicate    Partial      Shard(0)
    optim_grads           2      Replicate    Shard(0)     Shard(0)
    optim_grads_params    3      Shard(0)     Shard(0)     Shard(0)

A `Partial` gradient stays unreduced on each rank until the last microbatch, a sharded one is reduced after each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard


@dataclass(frozen=True, init=False)
class Placements:
    """Placements of parameters, gradients and optimizer state, one per mesh axis for each.

    Raises ValueError for a combination that is not a row of the table above.
    """

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
        row = (self.parameter, self.gradient, self.optimizer)
        if row not in _ROWS.values():
            table = "; ".join(
                f"{name}: {parameter[0]}, {gradient[0]}, {optimizer[0]}"
                for name, (parameter, gradient, optimizer) in _ROWS.items()
            )
            raise ValueError(
                f"Placements{row}: no such combination of (parameter, gradient, optimizer); choose one of {table}"
            )

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps only its shard of the parameters at rest."""
        return self.parameter[-1].is_shard()

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank updates only its shard of the weights."""
        return self.optimizer[-1].is_shard()

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether gradients are reduced after every backward, the last of a step or not."""
        return self.gradient[-1].is_shard()


def placements_of(strategy: "str | Placements") -> Placements:
    """The placements that a strategy's name stands for. Raises ValueError for an unknown name."""
    if isinstance(strategy, Placements):
        return strategy
    if strategy not in _ROWS:
        raise ValueError(f"strategy={strategy!r}: choose one of {', '.join(map(repr, _ROWS))} or weft.Placements(...)")
    return Placements(*_ROWS[strategy])


_ROWS: dict[str, tuple[tuple[Placement, ...], ...]] = {
    "no_shard": ((Replicate(),), (Partial(),), (Replicate(),)),
    "optim": ((Replicate(),), (Partial(),), (Shard(0),)),
    "optim_grads": ((Replicate(),), (Shard(0),), (Shard(0),)),
    "optim_grads_params": ((Shard(0),), (Shard(0),), (Shard(0),)),
}
