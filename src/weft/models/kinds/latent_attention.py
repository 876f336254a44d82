"""The fields of multi-head latent attention `+`."""

from dataclasses import dataclass

from weft.models.kinds.attention import AnyAttention
from weft.models.kinds.fields import optional_size, require, size
from weft.models.kinds.trunk import Kind

KIND = Kind("+", "multi-head latent attention", "self_attention", "latent_attention:LatentAttention")


@dataclass(frozen=True)
class LatentAttention(AnyAttention, kind=KIND):
    """The fields of multi-head latent attention, `+` in patterns."""

    q_lora_rank: int | None = optional_size()
    """Width of the latent of the queries of `+`; None: the queries have no latent."""
    kv_lora_rank: int = size(32)
    """Width of the latent of keys and values of `+`."""
    qk_nope_head_dim: int = size(32)
    """Width of the unrotated part of each head's key in `+`."""
    qk_rope_head_dim: int = size(16)
    """Width of the rotated part of a key in `+`, an even number. All heads share this part."""
    v_head_dim: int = size(32)
    """Width of a head's value in `+`."""

    def check(self) -> None:
        """Raise `ValueError` if an odd number of elements would be rotated, or if `attention_bias` is "qkv"."""
        even = not self.rope_theta or self.qk_rope_head_dim % 2 == 0
        require(self, "qk_rope_head_dim", even, "even: pairs are rotated")
        require(self, "attention_bias", self.attention_bias != "qkv", "'none' or 'all' with layers '+'")
