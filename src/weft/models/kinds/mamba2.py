"""Mamba-2 `M`."""

from dataclasses import dataclass

from weft.models.kinds.fields import amount, choice, optional_positive, positive, require, size, switch
from weft.models.kinds.trunk import Kind, Trunk

KIND = Kind("M", "Mamba-2", "mixer", "mamba2:Mamba2")


@dataclass(frozen=True)
class Mamba2(Trunk, kind=KIND):
    """The fields of `M`."""

    mamba_num_heads: int = size(8)
    """Heads of `M`."""
    mamba_head_dim: int = size(32)
    """Width of one head of `M`."""
    ssm_state_size: int = size(32)
    """Width of the state of `M` for each element of a head."""
    mamba_n_groups: int = size(1)
    """Groups of heads of `M` that share B and C, the projections to and from the state; divides the heads."""
    conv_kernel: int = size(4)
    """Positions that the convolution of `M` sees."""
    conv_bias: bool = switch(True)
    """Whether that convolution has a bias."""
    mamba_bias: bool = switch(False)
    """Whether the projections of `M` have a bias."""
    mamba_norm: str = choice("gate_first", ("gate_first", "norm_first", "none"))
    """Order of gate and norm on the output of `M`: "gate_first", "norm_first", or "none", the gate without a norm."""
    time_step_min: float = positive(0.001, result=False)
    """Smallest step that heads of `M` start with."""
    time_step_max: float = positive(0.1, result=False)
    """Largest step that heads of `M` start with."""
    time_step_floor: float = positive(0.0001, result=False)
    """Lower bound of the steps that heads of `M` start with."""
    time_step_limit_min: float = amount(0.0)
    """Lower bound of every step of `M`."""
    time_step_limit_max: float | None = optional_positive()
    """Upper bound of every step of `M`; None: no bound."""
    chunk_size: int = size(128, result=False)
    """Positions that `M` computes at once; changes rounding and speed only."""
    mamba_kernel: str = choice("auto", ("auto", "torch", "mamba_ssm"), result=False)
    """Kernel of the state space of `M`: "mamba_ssm", "torch", or "auto": the first of these that runs."""

    def check(self) -> None:
        """Raise `ValueError` if groups do not divide the heads, or a minimum is above its maximum."""
        heads, groups = self.mamba_num_heads, self.mamba_n_groups
        require(self, "mamba_n_groups", heads % groups == 0, f"a divisor of mamba_num_heads={heads}")
        low, high = self.time_step_min, self.time_step_max
        require(self, "time_step_min", low <= high, f"at most time_step_max={high}")
        low, limit = self.time_step_limit_min, self.time_step_limit_max
        require(self, "time_step_limit_max", limit is None or limit > low, f"more than time_step_limit_min={low}")
