"""The configuration of a hybrid model."""

from dataclasses import dataclass
from typing import Any

from weft.models.pattern import Pattern, parse, require_built


@dataclass(frozen=True)
class HybridConfig:
    """What a hybrid model is made of. A wrong value is a `ValueError` at once, with the rule and the fix."""

    pattern: str = "M[*-]M[*E]"
    """The stack, in the language of `weft.models.pattern`."""
    vocab_size: int = 256
    """Number of different tokens."""
    hidden_size: int = 128
    """Width of the residual stream."""

    num_attention_heads: int = 4
    """Query heads of `*`."""
    num_key_value_heads: int = 2
    """Key and value heads of `*`; divides the query heads, which share them in equal groups."""
    head_dim: int | None = None
    """Width of one head, even; None: hidden_size / num_attention_heads."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding's wavelengths."""

    intermediate_size: int = 256
    """Inner width of `-`."""

    num_experts: int = 8
    """Experts of `E`."""
    num_experts_per_tok: int = 2
    """Experts that one token visits."""
    moe_intermediate_size: int = 64
    """Inner width of one expert."""
    shared_expert_intermediate_size: int = 0
    """Inner width of the expert that every token visits; 0: none."""
    router_score: str = "softmax"
    """How router logits become scores: "softmax" or "sigmoid"."""
    norm_topk_prob: bool = True
    """Whether the scores of a token's experts are scaled to sum to 1."""
    routed_scaling_factor: float = 1.0
    """What those scores are multiplied with."""
    n_group: int = 1
    """Groups of experts: a token's experts are chosen among the best groups only."""
    topk_group: int = 1
    """Groups that one token may choose from."""
    expert_bias: bool = False
    """Whether a bias balances the load without a loss; whoever trains updates it."""
    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss."""
    z_loss_coef: float = 0.0
    """Weight of the router's z-loss."""
    capacity_factor: float | None = None
    """Room per expert relative to a balanced load; None: no token is ever dropped."""

    rms_norm_eps: float = 1e-5
    """Added to the mean square before its root."""
    tie_word_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    mtp_loss_coef: float = 0.3
    """Weight of the mean loss over the prediction depths."""
    recompute: tuple[str, ...] = ()
    """Stages whose activations backward computes again: "attend" (the blocks before the experts or the MLP),
    "experts" (those)."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise ValueError(f"pattern={self.pattern!r}: the pattern is a string, such as '[*-][*-]'")
        require_built(self.parsed)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "n_group",
            "topk_group",
        ):
            self._require(name, _is_integer(getattr(self, name), 1), "a positive integer")
        self._require("head_dim", self.head_dim is None or _is_integer(self.head_dim, 1), "a positive integer or None")
        name = "shared_expert_intermediate_size"
        self._require(name, _is_integer(getattr(self, name), 0), "an integer, 0 for no shared expert")
        for name in ("rope_theta", "rms_norm_eps", "routed_scaling_factor"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and value > 0, "a positive number")
        for name in ("aux_loss_coef", "z_loss_coef", "mtp_loss_coef"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and value >= 0, "a number, 0 for none")
        value = self.capacity_factor
        self._require(
            "capacity_factor", value is None or (_is_number(value) and value > 0), "a positive number or None"
        )
        for name in ("norm_topk_prob", "tie_word_embeddings", "expert_bias"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        self._require("router_score", self.router_score in ("softmax", "sigmoid"), "'softmax' or 'sigmoid'")
        object.__setattr__(self, "recompute", tuple(self.recompute))
        self._require("recompute", set(self.recompute) <= {"attend", "experts"}, "some of 'attend' and 'experts'")
        if "*" in self.pattern:
            self._check_attention()
        if "E" in self.pattern:
            self._require(
                "num_experts_per_tok",
                self.num_experts_per_tok <= self.num_experts,
                f"at most num_experts={self.num_experts}",
            )
            self._check_groups()

    @property
    def parsed(self) -> Pattern:
        """The pattern, parsed."""
        return parse(self.pattern)

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head, `head_dim` or what follows from the hidden size."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def _check_attention(self) -> None:
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}, so a "
                f"head has no whole width; change one of them or set head_dim"
            )
        if self.attention_head_dim % 2:
            raise ValueError(
                f"a head is {self.attention_head_dim} wide (head_dim={self.head_dim}, "
                f"hidden_size={self.hidden_size}, num_attention_heads={heads}); rotation needs an even "
                f"width: set an even head_dim"
            )
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={heads}; "
                f"choose it from {[size for size in range(1, heads + 1) if heads % size == 0]}"
            )

    def _check_groups(self) -> None:
        """A token's experts are chosen in `topk_group` of `n_group` groups."""
        experts, groups = self.num_experts, self.n_group
        self._require("n_group", experts % groups == 0, f"a divisor of num_experts={experts}")
        self._require("topk_group", self.topk_group <= groups, f"at most n_group={groups}")
        room = self.topk_group * (experts // groups)
        self._require(
            "num_experts_per_tok",
            self.num_experts_per_tok <= room,
            f"at most {room}, the experts of topk_group={self.topk_group} groups of {experts // groups}; choose fewer, "
            "or more groups",
        )

    def _require(self, name: str, fits: bool, rule: str) -> None:
        if not fits:
            raise ValueError(f"{name}={getattr(self, name)!r}: {name} must be {rule}")


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0
