"""The fields of the mixture of experts `E`."""

from dataclasses import dataclass

from weft.models.kinds.fields import (
    amount,
    choice,
    declared,
    is_whole,
    optional_positive,
    optional_size,
    positive,
    require,
    size,
    switch,
)
from weft.models.kinds.mlp import AnyMLP
from weft.models.kinds.trunk import Kind
from weft.moe.kinds import ROWS_PER

KIND = Kind("E", "mixture of experts", "mlp", "experts:Experts")


@dataclass(frozen=True)
class Experts(AnyMLP, kind=KIND):
    """The fields of the mixture of experts, `E` in patterns."""

    num_experts: int = size(8)
    """The number of experts of `E`."""
    num_experts_per_tok: int = size(2)
    """The number of experts per token."""
    moe_intermediate_size: int = size(64)
    """Inner width of one expert."""
    moe_rows_per: str = choice("rank", ROWS_PER, result=False)
    """With expert parallelism, how often a token is sent: once per "rank" that has some of its experts, or once per
    "expert". "expert" may send more data, but adds the outputs of a token's experts in the order of one process."""
    moe_latent_size: int | None = optional_size()
    """Width of the latent in which routed experts work. Linear layers project tokens to it and back; None: no latent,
    so experts work in hidden_size."""
    shared_expert_intermediate_size: int = declared(
        0, lambda value: is_whole(value, 0), "an integer, 0 for no shared expert"
    )
    """Inner width of the shared expert, which processes every token; 0: no shared expert."""
    shared_expert_gate: bool = switch(False)
    """Whether the output of the shared expert is multiplied by a sigmoid gate, one number per token."""
    experts_bias: bool = switch(False)
    """Whether the projections of the experts have a bias."""
    router_bias: bool = switch(False)
    """Whether the router's logits have a learned bias."""
    router_score: str = choice("softmax", ("softmax", "sigmoid"))
    """Function that turns router logits into scores: "softmax" or "sigmoid"."""
    norm_topk_prob: bool = switch(True)
    """Whether the scores of a token's experts are scaled so that their sum is 1."""
    routed_scaling_factor: float = positive(1.0)
    """Factor that multiplies the scores of a token's experts, after `norm_topk_prob` is applied."""
    n_group: int = size(1)
    """The number of groups of experts. A token's experts are in its best `topk_group` groups."""
    topk_group: int = size(1)
    """The number of groups from which a token's experts are chosen."""
    expert_bias: bool = switch(False)
    """Whether a bias on the router's scores balances the load of the experts without an auxiliary loss. The training
    loop updates the bias."""
    aux_loss_coef: float = amount(0.0, result=False)
    """Weight of the load-balancing loss."""
    z_loss_coef: float = amount(0.0, result=False)
    """Weight of the router's z-loss."""
    capacity_factor: float | None = optional_positive()
    """Capacity of an expert: the most tokens of a sequence that it processes, relative to a balanced load. Tokens above
    the capacity are dropped; None: no limit."""
    pad_to_capacity: bool = switch(False)
    """Whether the rows of each expert are padded with zeros to its capacity; shapes then do not depend on routing."""

    def check(self) -> None:
        """Raise `ValueError` if fields of `E` do not fit each other."""
        experts, groups, visited = self.num_experts, self.n_group, self.num_experts_per_tok
        require(self, "num_experts_per_tok", visited <= experts, f"at most num_experts={experts}")
        has_shared = self.shared_expert_intermediate_size > 0
        rule = "False without a capacity; set capacity_factor"
        require(self, "pad_to_capacity", self.capacity_factor is not None or not self.pad_to_capacity, rule)
        rule = 'False with one row per rank; set moe_rows_per="expert"'
        require(self, "pad_to_capacity", self.moe_rows_per == "expert" or not self.pad_to_capacity, rule)
        rule = "False without a shared expert; set shared_expert_intermediate_size"
        require(self, "shared_expert_gate", has_shared or not self.shared_expert_gate, rule)
        require(self, "n_group", experts % groups == 0, f"a divisor of num_experts={experts}")
        require(self, "topk_group", self.topk_group <= groups, f"at most n_group={groups}")
        room = self.topk_group * (experts // groups)
        rule = (
            f"at most {room}, the experts of topk_group={self.topk_group} groups of {experts // groups}; choose fewer, "
            "or more groups"
        )
        require(self, "num_experts_per_tok", visited <= room, rule)
