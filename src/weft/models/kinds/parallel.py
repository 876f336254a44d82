"""The fields of attention and Mamba-2 side by side, `P`."""

from dataclasses import dataclass

from weft.models.kinds.attention import Attention
from weft.models.kinds.fields import number, numbers
from weft.models.kinds.mamba2 import Mamba2
from weft.models.kinds.trunk import Kind

KIND = Kind("P", "attention and Mamba-2 side by side", "mixer", "parallel:Parallel")


@dataclass(frozen=True)
class Parallel(Mamba2, Attention, kind=KIND):
    """The fields of `P` (attention and Mamba-2 side by side): the fields below, and the fields of `*` and `M`."""

    attention_out_multiplier: float = number(1.0)
    """Factor that multiplies the output of attention in `P` before both outputs are added."""
    ssm_out_multiplier: float = number(1.0)
    """Factor that multiplies the output of Mamba-2 in `P` before both outputs are added."""
    ssm_multipliers: tuple[float, ...] = numbers(5)
    """Factors that multiply the five parts of the Mamba-2 projection in `P`: gate, x, B, C and time step."""
