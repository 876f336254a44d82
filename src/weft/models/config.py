"""The configuration of a hybrid model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.models.pattern import Pattern, parse
from weft.models.rope_scaling import check_rope_scaling
from weft.moe.kinds import ACTS, ROWS_PER, Clamp


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
    """Query heads of `*`; heads of `+`."""
    num_key_value_heads: int = 2
    """Key and value heads of `*`; divides the query heads, which share them in equal groups."""
    head_dim: int | None = None
    """Width of one head of `*`, even if it is rotated; None: hidden_size / num_attention_heads."""
    attention_bias: str = "none"
    """Which projections of attention have a bias: "none", "qkv" or "all"; in `+` those from and to the hidden size."""
    attention_scale: float | None = None
    """What products of queries and keys are multiplied with; None: (width of a key)^-0.5."""
    attention_output_gate: bool = False
    """Whether a sigmoid, computed beside the queries of `*`, multiplies what its heads give."""
    qk_norm: str = "none"
    """Norms of queries and keys of `*` before rotation: "none", over each "head", or "full", over all heads."""
    sliding_window: int | None = None
    """How many positions one position of `*` sees, itself included; None: all before."""
    windowed: tuple[int, ...] | None = None
    """Which layers `*` of a part have that window, counted from 0; None: all."""
    attention_sinks: bool = False
    """Whether each head of `*` has a learned score that takes part in the softmax and gives nothing."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding's wavelengths; 0: no rotation."""
    partial_rotary_factor: float = 1.0
    """Part of a head of `*` that is rotated, its first elements."""
    rope_interleave: bool = False
    """Whether neighbours are rotated as a pair, not the elements of two halves."""
    rope_scaling: dict | None = None
    """Rotation for longer contexts: rope_type "linear", "llama3", "yarn", "dynamic" or "longrope", and its numbers, as
    in transformers."""
    rope_local_theta: float | None = None
    """Base of the rotation, without scaling, of layers `*` with a window; None: that of all layers."""
    unrotated: tuple[int, ...] = ()
    """Which layers `*` of a part have no rotation, counted from 0."""

    q_lora_rank: int | None = None
    """Width of the latent of the queries of `+`; None: no latent."""
    kv_lora_rank: int = 32
    """Width of the latent of keys and values of `+`."""
    qk_nope_head_dim: int = 32
    """Width of the part of a head's key in `+` that is not rotated."""
    qk_rope_head_dim: int = 16
    """Width of the part of a key in `+` that is rotated, even; all heads share it."""
    v_head_dim: int = 32
    """Width of a head's value in `+`."""

    mamba_num_heads: int = 8
    """Heads of `M`."""
    mamba_head_dim: int = 32
    """Width of one head of `M`."""
    ssm_state_size: int = 32
    """Width of the state of `M` for each element of a head."""
    mamba_n_groups: int = 1
    """Groups of heads of `M` that share what writes to and reads from the state; divides the heads."""
    conv_kernel: int = 4
    """Positions that the convolution of `M` sees."""
    conv_bias: bool = True
    """Whether that convolution has a bias."""
    mamba_bias: bool = False
    """Whether the projections of `M` have a bias."""
    time_step_min: float = 0.001
    """Smallest step that heads of `M` start with."""
    time_step_max: float = 0.1
    """Largest step that heads of `M` start with."""
    time_step_floor: float = 0.0001
    """What no step of `M` starts below."""
    time_step_limit_min: float = 0.0
    """What no step of `M` falls below."""
    time_step_limit_max: float | None = None
    """What no step of `M` exceeds; None: no such limit."""
    chunk_size: int = 128
    """Positions that `M` computes at once; changes rounding and speed only."""
    mamba_kernel: str = "auto"
    """What computes the state space of `M`: "mamba_ssm", "torch", or "auto", the first where it runs."""

    linear_num_key_heads: int = 4
    """Key heads of `G`."""
    linear_num_value_heads: int = 4
    """Value heads of `G`, a multiple of its key heads."""
    linear_key_head_dim: int = 32
    """Width of a key head of `G`."""
    linear_value_head_dim: int = 32
    """Width of a value head of `G`."""
    linear_conv_kernel_dim: int = 4
    """Positions that the convolution of `G` sees."""
    delta_kernel: str = "auto"
    """What computes the delta rule of `G`: "fla", "torch", or "auto", the first where it runs."""

    intermediate_size: int = 256
    """Inner width of `-`."""
    hidden_act: str = "silu"
    """Kind of all MLPs: "silu", with a gate (SwiGLU), "clamped_swiglu", the same within limits, "gelu_tanh", with a
    gate (GEGLU, GELU by its tanh formula), or "relu2", squared ReLU without one."""
    swiglu_limit: float = 7.0
    """What gate and up of "clamped_swiglu" stay within."""
    swiglu_alpha: float = 1.702
    """The factor inside the sigmoid of "clamped_swiglu"."""
    mlp_bias: bool = False
    """Whether projections of `-`, of the shared expert and of the latent of `E` have a bias."""

    num_experts: int = 8
    """Experts of `E`."""
    num_experts_per_tok: int = 2
    """Experts that one token visits."""
    moe_intermediate_size: int = 64
    """Inner width of one expert."""
    moe_rows_per: str = "rank"
    """What a token travels to once where experts are spread over ranks: "rank", each rank that has experts of it; or
    "expert", each of its experts: more rows, added up as in one process, bit for bit."""
    moe_latent_size: int | None = None
    """Width in which tokens travel to experts and are computed there; None: hidden_size."""
    shared_expert_intermediate_size: int = 0
    """Inner width of the expert that every token visits; 0: none."""
    shared_expert_gate: bool = False
    """Whether a sigmoid, one number per token, multiplies what that expert gives."""
    experts_bias: bool = False
    """Whether the projections of the experts have a bias."""
    router_bias: bool = False
    """Whether the router's logits have a learned bias."""
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
    zero_centered_norm: bool = False
    """Whether norms multiply with 1 + weight; not those inside of `M`, `G` and the latents of `+`."""
    norm_order: str = "pre"
    """Where each layer is normalised: its input ("pre"), what it adds to the residual stream ("post"), or "both"."""
    pad_token_id: int | None = None
    """A token whose embedding gets no gradient; None: all get theirs."""
    tie_word_embeddings: bool = False
    """Whether the head uses the embedding's weight."""
    embedding_multiplier: float = 1.0
    """What embeddings are multiplied with."""
    residual_multiplier: float = 1.0
    """What each layer's part is multiplied with before it is added to the residual stream."""
    logits_scaling: float = 1.0
    """What the scores of the head are divided by."""
    mtp_loss_coef: float = 0.3
    """Weight of the mean loss over the prediction depths."""
    recompute: tuple[str, ...] = ()
    """Stages whose activations backward computes again: "attend" (the blocks before the experts or the MLP),
    "experts" (those)."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise ValueError(f"pattern={self.pattern!r}: the pattern is a string, such as '[*-][*-]'")
        parse(self.pattern)
        for name in _SIZES:
            self._require(name, _is_integer(getattr(self, name), 1), "a positive integer")
        for name in ("head_dim", "q_lora_rank", "sliding_window", "moe_latent_size"):
            value = getattr(self, name)
            self._require(name, value is None or _is_integer(value, 1), "a positive integer or None")
        name = "shared_expert_intermediate_size"
        self._require(name, _is_integer(getattr(self, name), 0), "an integer, 0 for no shared expert")
        positive = ("rms_norm_eps", "routed_scaling_factor", "time_step_min", "time_step_max", "time_step_floor")
        multipliers = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        for name in (*positive, *multipliers, "swiglu_limit", "swiglu_alpha"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and value > 0, "a positive number")
        for name in ("aux_loss_coef", "z_loss_coef", "mtp_loss_coef", "rope_theta", "time_step_limit_min"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and value >= 0, "a number, 0 for none")
        for name in ("capacity_factor", "attention_scale", "time_step_limit_max", "rope_local_theta"):
            value = getattr(self, name)
            self._require(name, value is None or (_is_number(value) and value > 0), "a positive number or None")
        for name in _SWITCHES:
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        for name, choices in _CHOICES.items():
            self._require(name, getattr(self, name) in choices, " or ".join(map(repr, choices)))
        object.__setattr__(self, "recompute", tuple(self.recompute))
        self._require("recompute", set(self.recompute) <= {"attend", "experts"}, "some of 'attend' and 'experts'")
        token = self.pad_token_id
        fits = token is None or (_is_integer(token, 0) and token < self.vocab_size)
        self._require("pad_token_id", fits, f"a token below vocab_size={self.vocab_size}, or None")
        self._check_unrotated()
        symbols = set(self.pattern)
        if "*" in symbols:
            self._check_attention()
        if symbols & set("*+"):
            self._check_rotation()
        if "M" in symbols:
            self._check_mamba()
        if "G" in symbols:
            keys = self.linear_num_key_heads
            fits = self.linear_num_value_heads % keys == 0
            self._require("linear_num_value_heads", fits, f"a multiple of linear_num_key_heads={keys}")
        if "E" in symbols:
            self._require(
                "num_experts_per_tok",
                self.num_experts_per_tok <= self.num_experts,
                f"at most num_experts={self.num_experts}",
            )
            self._require(
                "shared_expert_gate",
                not self.shared_expert_gate or self.shared_expert_intermediate_size > 0,
                "False where there is no shared expert; set shared_expert_intermediate_size",
            )
            self._check_groups()

    @property
    def parsed(self) -> Pattern:
        """The pattern, parsed."""
        return parse(self.pattern)

    @property
    def clamp(self) -> Clamp:
        """The numbers of a clamped SwiGLU."""
        return Clamp(self.swiglu_limit, self.swiglu_alpha)

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head, `head_dim` or what follows from the hidden size."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """How many elements of a head of `*` are rotated."""
        return int(self.attention_head_dim * self.partial_rotary_factor)

    def window_of(self, number: int) -> int | None:
        """How many positions the layer `*` of that number in its part sees; None: all before."""
        return self.sliding_window if self.windowed is None or number in self.windowed else None

    def _check_attention(self) -> None:
        self._check_windows()
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}, so a "
                f"head has no whole width; change one of them or set head_dim"
            )
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={heads}; "
                f"choose it from {[size for size in range(1, heads + 1) if heads % size == 0]}"
            )

    def _check_windows(self) -> None:
        if self.windowed is None:
            return
        self._require("windowed", self.sliding_window is not None, "None where there is no sliding_window; set one")
        layers = sum(layer.symbols.count("*") for layer in self.parsed.layers)
        numbers = isinstance(self.windowed, list | tuple) and all(_is_integer(each, 0) for each in self.windowed)
        fits = numbers and len(set(self.windowed)) == len(self.windowed) and max(self.windowed, default=0) < layers
        self._require("windowed", fits, f"different numbers from 0 to {layers - 1} of layers '*', or None")
        object.__setattr__(self, "windowed", tuple(sorted(self.windowed)))

    def _check_unrotated(self) -> None:
        layers = sum(layer.symbols.count("*") for layer in self.parsed.layers)
        numbers = isinstance(self.unrotated, list | tuple) and all(_is_integer(each, 0) for each in self.unrotated)
        fits = numbers and len(set(self.unrotated)) == len(self.unrotated) and max(self.unrotated, default=-1) < layers
        self._require("unrotated", fits, f"different numbers of the {layers} layers '*', from 0")
        object.__setattr__(self, "unrotated", tuple(sorted(self.unrotated)))

    def _check_rotation(self) -> None:
        """Pairs are rotated, in a way that is known."""
        factor = self.partial_rotary_factor
        self._require("partial_rotary_factor", _is_number(factor) and 0 < factor <= 1, "more than 0 and at most 1")
        if self.rope_theta and "+" in self.pattern:
            self._require("qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "even: pairs are rotated")
        if self.rope_theta and "*" in self.pattern and (self.rotary_width % 2 or not self.rotary_width):
            raise ValueError(
                f"a head is {self.attention_head_dim} wide (head_dim={self.head_dim}, hidden_size={self.hidden_size}, "
                f"num_attention_heads={self.num_attention_heads}), of which {self.rotary_width} are rotated "
                f"(partial_rotary_factor={factor}); rotation needs an even width: set an even head_dim"
            )
        if self.rope_scaling is None:
            return
        self._require("rope_scaling", isinstance(self.rope_scaling, Mapping), "a table with a rope_type, or None")
        self._require("rope_scaling", self.rope_theta > 0, "None where rope_theta is 0")
        check_rope_scaling(
            self.rope_scaling, (self.rotary_width if "*" in self.pattern else self.qk_rope_head_dim) // 2
        )

    def _check_mamba(self) -> None:
        heads, groups = self.mamba_num_heads, self.mamba_n_groups
        self._require("mamba_n_groups", heads % groups == 0, f"a divisor of mamba_num_heads={heads}")
        low, high = self.time_step_min, self.time_step_max
        self._require("time_step_min", low <= high, f"at most time_step_max={high}")
        low, limit = self.time_step_limit_min, self.time_step_limit_max
        self._require("time_step_limit_max", limit is None or limit > low, f"more than time_step_limit_min={low}")

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


_SIZES = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "mamba_n_groups", "conv_kernel", "chunk_size"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"),
    "topk_group",
)
_SWITCHES = (
    *("attention_output_gate", "rope_interleave", "conv_bias", "mamba_bias", "mlp_bias", "shared_expert_gate"),
    *("norm_topk_prob", "zero_centered_norm", "tie_word_embeddings", "expert_bias"),
    *("attention_sinks", "experts_bias", "router_bias"),
)
_CHOICES = {
    "attention_bias": ("none", "qkv", "all"),
    "qk_norm": ("none", "head", "full"),
    "norm_order": ("pre", "post", "both"),
    "hidden_act": ACTS,
    "moe_rows_per": ROWS_PER,
    "router_score": ("softmax", "sigmoid"),
    "mamba_kernel": ("auto", "torch", "mamba_ssm"),
    "delta_kernel": ("auto", "torch", "fla"),
}
