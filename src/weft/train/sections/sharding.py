"""[sharding]: what is cut over the ranks, and how."""

from dataclasses import dataclass
from typing import Literal

from weft.train.sections.rules import require


@dataclass(frozen=True)
class ShardingConfig:
    """[sharding]: what is cut over the ranks."""

    strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What each rank keeps only its part of: nothing, optimizer state, + gradients, + weights."""
    dp_shard: int = -1
    """Ranks over which it is cut; -1: all of them."""
    ep: int = 1
    """Ranks that share one copy of the experts and exchange tokens; divides the number of ranks."""

    def __post_init__(self) -> None:
        require("sharding.ep", self.ep, self.ep >= 1, "must be a number of ranks, 1 for every expert on every rank")
        require(
            "sharding.dp_shard",
            self.dp_shard,
            self.dp_shard == -1 or self.dp_shard >= 1,
            "must be a number of ranks, or -1 for all of them",
        )
