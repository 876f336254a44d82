"""The fields of Kimi delta attention `K`."""

from dataclasses import dataclass

from weft.models.kinds.fields import size
from weft.models.kinds.trunk import Kind, Trunk

KIND = Kind("K", "Kimi delta attention", "mixer", "kimi_delta:KimiDelta")


@dataclass(frozen=True)
class KimiDelta(Trunk, kind=KIND):
    """The fields of Kimi delta attention, `K` in patterns."""

    kda_num_heads: int = size(4)
    """The number of heads of `K`."""
    kda_head_dim: int = size(32)
    """Width of the keys and values in a head of `K`, and of the latents for decay and gate in `K`."""
    kda_conv_kernel: int = size(4)
    """Kernel width of the convolution of `K`, in positions."""
