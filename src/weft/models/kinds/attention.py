"""The fields of self-attention `*`, and the fields that `*` shares with latent attention `+`."""

from collections.abc import Mapping
from dataclasses import dataclass

from weft.models.kinds.fields import (
    amount,
    any_value,
    choice,
    declared,
    is_number,
    is_whole,
    optional_positive,
    optional_size,
    require,
    size,
    switch,
)
from weft.models.kinds.trunk import Kind, Trunk
from weft.models.rope_scaling import check_rope_scaling


@dataclass(frozen=True)
class AnyAttention(Trunk):
    """The fields of all kinds of attention."""

    num_attention_heads: int = size(4)
    """The number of query heads of `*`, and the number of heads of `+`."""
    attention_bias: str = choice("none", ("none", "qkv", "all"))
    """Which projections of attention have a bias: "none", "qkv" or "all". In `+`, "all" means the projections to
    the latents and the output projection."""
    attention_scale: float | None = optional_positive()
    """Factor that multiplies the dot products of queries and keys; None: 1 / sqrt(width of a key)."""
    rope_theta: float = amount(10000.0)
    """Base (theta) of the frequencies of the rotary position embedding; 0: no rotation."""
    rope_interleave: bool = switch(False)
    """Whether the two elements of a rotated pair are adjacent. False: they are element i of the first half and element
    i of the second half of the rotated elements."""
    rope_scaling: dict | None = declared(  # noqa: RUF009
        None, lambda table: table is None or isinstance(table, Mapping), "a table with a rope_type, or None"
    )
    """Scaling of the rotation for longer contexts, as in transformers: a table with rope_type ("linear", "llama3",
    "yarn", "dynamic" or "longrope") and the parameters of this type."""

    @property
    def rotated(self) -> int:
        """The number of elements of a head that are rotated."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `ValueError` if `rope_scaling` is invalid, or is set although `rope_theta` is 0 (no rotation)."""
        if self.rope_scaling is None:
            return
        require(self, "rope_scaling", self.rope_theta > 0, "None if rope_theta is 0")
        check_rope_scaling(self.rope_scaling, self.rotated // 2)


KIND = Kind("*", "self-attention", "self_attention", "attention:Attention")


@dataclass(frozen=True)
class Attention(AnyAttention, kind=KIND):
    """The fields of self-attention, `*` in patterns."""

    num_key_value_heads: int = size(2)
    """The number of key heads of `*`, and also of value heads. It must divide the number of query heads: equal groups
    of query heads share a key head and a value head."""
    head_dim: int | None = optional_size()
    """Width of one head of `*`; None: hidden_size / num_attention_heads. The rotated part must have an even width."""
    attention_output_gate: bool = switch(False)
    """Whether the output of each head of `*` is multiplied by a sigmoid gate, projected together with the queries."""
    qk_norm: str = choice("none", ("none", "head", "full"))
    """Norm of the queries and keys of `*` before rotation: "none", "head" (of each head), or "full" (over all heads).
    """
    sliding_window: int | None = optional_size()
    """Number of positions that a query of `*` attends to, including its own; None: all positions up to its own."""
    windowed: tuple[int, ...] | None = any_value(None)
    """Indices of the layers `*` that have a sliding window; None: all layers `*`, and the attention of `P`. The index
    counts only layers `*`, from 0, and restarts at 0 in each prediction depth."""
    attention_sinks: bool = switch(False)
    """Whether each head of `*` has an attention sink: a learned extra logit, without a value, in the softmax."""
    partial_rotary_factor: float = declared(
        1.0, lambda factor: is_number(factor) and 0 < factor <= 1, "more than 0 and at most 1"
    )
    """Fraction of each head of `*` that is rotated. The first elements of the head are rotated."""
    rope_local_theta: float | None = optional_positive()
    """`rope_theta` for the attention of `*` and `P` with a sliding window. If set, `rope_scaling` does not apply to it;
    None: it rotates like the other attention."""
    unrotated: tuple[int, ...] = any_value(())
    """Indices of the layers `*` without rotation. The index counts only layers `*`, from 0, and restarts at 0 in each
    prediction depth."""

    context_attention: str = choice("gather", ("gather", "heads"), result=False)
    """With context parallelism, how `*` attends to positions on other ranks: "gather" gathers keys and values; "heads"
    exchanges positions for heads, so that each rank has some of the heads at all positions."""

    @property
    def attention_head_dim(self) -> int:
        """Width of a head of `*`: `head_dim`, or hidden size / number of query heads if `head_dim` is None."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """The number of elements of a head of `*` that are rotated."""
        return int(self.attention_head_dim * self.partial_rotary_factor)

    def window_of(self, number: int) -> int | None:
        """Return the window, in positions, of the layer `*` that has this `number`, or None if it has no window.

        Layers `*` are numbered from 0. The attention of `P` has the number -1.
        """
        return self.sliding_window if self.windowed is None or number in self.windowed else None

    def check(self) -> None:
        """Raise `ValueError` if fields of `*` do not fit each other. Sort `windowed` and `unrotated`."""
        layers, heads = self.count("*"), self.num_attention_heads
        local = self.rope_local_theta is None or self.rope_theta > 0
        require(self, "rope_local_theta", local, "None if rope_theta is 0")
        if self.windowed is not None:
            window = self.sliding_window is not None
            require(self, "windowed", window, "None without sliding_window; set one")
            rule = f"distinct numbers from 0 to {layers - 1} of layers '*', or None"
            self._order("windowed", layers, rule)
        self._order("unrotated", layers, f"distinct numbers from 0 to {layers - 1} of layers '*'")
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={heads}, so the width of a "
                f"head is not an integer; change one of them or set head_dim"
            )
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={heads}; "
                f"choose it from {[size for size in range(1, heads + 1) if heads % size == 0]}"
            )
        if self.rope_theta and (self.rotary_width % 2 or not self.rotary_width):
            raise ValueError(
                f"a head is {self.attention_head_dim} wide (head_dim={self.head_dim}, hidden_size={self.hidden_size}, "
                f"num_attention_heads={self.num_attention_heads}), of which {self.rotary_width} are rotated "
                f"(partial_rotary_factor={self.partial_rotary_factor}); rotation needs an even width: set an even "
                "head_dim"
            )

    def _order(self, name: str, layers: int, rule: str) -> None:
        given = getattr(self, name)
        whole = isinstance(given, list | tuple) and all(is_whole(each, 0) for each in given)
        fits = whole and len(set(given)) == len(given) and max(given, default=-1) < layers
        require(self, name, fits, rule)
        object.__setattr__(self, name, tuple(sorted(given)))
