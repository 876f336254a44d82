"""The fields of the dense MLP `-`, and the fields that `-` shares with experts."""

from dataclasses import dataclass

from weft.models.kinds.fields import choice, numbers, positive, require, size, switch
from weft.models.kinds.trunk import Kind, Trunk
from weft.moe.kinds import ACTS, GATED, Clamp


@dataclass(frozen=True)
class AnyMLP(Trunk):
    """The fields of all MLPs, including experts."""

    hidden_act: str = choice("silu", ACTS)
    """Activation of all MLPs: "silu" (SwiGLU), "clamped_swiglu" (SwiGLU with clamped inputs), "gelu_tanh" (GEGLU
    with the tanh approximation of GELU), or "relu2" (squared ReLU, without a gate)."""
    swiglu_limit: float = positive(7.0)
    """Bound to which "clamped_swiglu" clamps its inputs: the gate from above, the up projection from both sides."""
    swiglu_alpha: float = positive(1.702)
    """The factor inside the sigmoid of "clamped_swiglu"."""
    mlp_bias: bool = switch(False)
    """Whether projections have a bias: in `-`, in the shared expert of `E`, and to and from the latent of `E`."""

    @property
    def clamp(self) -> Clamp:
        """The bound and the factor of "clamped_swiglu"."""
        return Clamp(self.swiglu_limit, self.swiglu_alpha)


KIND = Kind("-", "dense MLP", "mlp", "mlp:MLP")


@dataclass(frozen=True)
class MLP(AnyMLP, kind=KIND):
    """The fields of the dense MLP, `-` in patterns."""

    intermediate_size: int = size(256)
    """Inner width of `-`."""
    mlp_multipliers: tuple[float, ...] = numbers(2)
    """Two factors in `-`: for its gate and for its output."""

    def check(self) -> None:
        """Raise `ValueError` if the MLP has no gate, but the factor of the gate in `mlp_multipliers` is not 1."""
        gated = self.hidden_act in GATED or self.mlp_multipliers[0] == 1
        require(self, "mlp_multipliers", gated, f"1, because hidden_act={self.hidden_act!r} has no gate")
