"""The fields of Mamba-2 `M`."""

from dataclasses import dataclass

from weft.models.kinds.fields import amount, choice, optional_positive, positive, require, size, switch
from weft.models.kinds.trunk import Kind, Trunk

KIND = Kind("M", "Mamba-2", "mixer", "mamba2:Mamba2")


@dataclass(frozen=True)
class Mamba2(Trunk, kind=KIND):
    """The fields of Mamba-2, `M` in patterns."""

    mamba_num_heads: int = size(8)
    """The number of heads of `M`."""
    mamba_head_dim: int = size(32)
    """Width of one head of `M`."""
    ssm_state_size: int = size(32)
    """Size of the state of `M` for each element of a head."""
    mamba_n_groups: int = size(1)
    """The number of groups of heads of `M`; it must divide the number of heads. The heads of a group share B and C, the
    projections to and from the state."""
    conv_kernel: int = size(4)
    """Kernel width of the convolution of `M`, in positions."""
    conv_bias: bool = switch(True)
    """Whether the convolution of `M` has a bias."""
    mamba_bias: bool = switch(False)
    """Whether the projections of `M` have a bias."""
    mamba_norm: str = choice("gate_first", ("gate_first", "norm_first", "none"))
    """Order of gate and norm on the output of `M`: "gate_first", "norm_first", or "none" (a gate without a norm)."""
    time_step_min: float = positive(0.001, result=False)
    """Lower end of the range from which the initial time steps of the heads of `M` are drawn."""
    time_step_max: float = positive(0.1, result=False)
    """Upper end of the range from which the initial time steps of the heads of `M` are drawn."""
    time_step_floor: float = positive(0.0001, result=False)
    """Lower bound to which the initial time steps of `M` are clamped after they are drawn."""
    time_step_limit_min: float = amount(0.0)
    """Lower bound to which all time steps of `M` are clamped."""
    time_step_limit_max: float | None = optional_positive()
    """Upper bound to which all time steps of `M` are clamped; None: no bound."""
    chunk_size: int = size(128, result=False)
    """Length, in positions, of the chunks in which `M` computes its recurrence; affects rounding, speed and memory."""
    mamba_kernel: str = choice("auto", ("auto", "torch", "mamba_ssm"), result=False)
    """Kernel for the recurrence of `M`: "mamba_ssm", "torch", or "auto" (mamba_ssm if it is usable, otherwise
    torch)."""

    def check(self) -> None:
        """Raise `ValueError` if the number of groups does not divide the number of heads.

        Also raises it if `time_step_min` is above `time_step_max`, or `time_step_limit_max` is not above
        `time_step_limit_min`.
        """
        heads, groups = self.mamba_num_heads, self.mamba_n_groups
        require(self, "mamba_n_groups", heads % groups == 0, f"a divisor of mamba_num_heads={heads}")
        low, high = self.time_step_min, self.time_step_max
        require(self, "time_step_min", low <= high, f"at most time_step_max={high}")
        low, limit = self.time_step_limit_min, self.time_step_limit_max
        require(self, "time_step_limit_max", limit is None or limit > low, f"more than time_step_limit_min={low}")
