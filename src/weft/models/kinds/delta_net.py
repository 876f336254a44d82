"""The fields of the gated delta net `G`."""

from dataclasses import dataclass

from weft.models.kinds.fields import choice, require, size
from weft.models.kinds.trunk import Kind, Trunk

KIND = Kind("G", "gated delta net", "mixer", "delta_net:GatedDeltaNet")


@dataclass(frozen=True)
class DeltaNet(Trunk, kind=KIND):
    """The fields of the gated delta net, `G` in patterns."""

    linear_num_key_heads: int = size(4)
    """The number of key heads of `G`."""
    linear_num_value_heads: int = size(4)
    """The number of value heads of `G`, a multiple of the number of its key heads."""
    linear_key_head_dim: int = size(32)
    """Width of a key head of `G`."""
    linear_value_head_dim: int = size(32)
    """Width of a value head of `G`."""
    linear_conv_kernel_dim: int = size(4)
    """Kernel width of the convolution of `G`, in positions."""
    delta_kernel: str = choice("auto", ("auto", "torch", "fla"), result=False)
    """Kernel for the delta rule of `G`: "fla", "torch", or "auto" (fla if it is usable, otherwise torch)."""

    def check(self) -> None:
        """Raise `ValueError` if the number of value heads is not a multiple of the number of key heads."""
        keys = self.linear_num_key_heads
        fits = self.linear_num_value_heads % keys == 0
        require(self, "linear_num_value_heads", fits, f"a multiple of linear_num_key_heads={keys}")
