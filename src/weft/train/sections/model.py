"""[model] with a factory: your own model, by its import path."""

from dataclasses import dataclass, field

from weft.train.sections.rules import require


@dataclass(frozen=True)
class OwnModelConfig:
    """[model]: your own model, which a function builds, instead of a pattern."""

    factory: str
    """A function that builds an nn.Module, on the meta device: "package.module:function"."""
    loss: str = ""
    """Your own `loss(model, microbatch)`; empty: the cross-entropy of what `model(tokens)` gives."""
    options: dict = field(default_factory=dict)
    """Arguments of the factory."""

    def __post_init__(self) -> None:
        for name in ("factory", "loss"):
            value = getattr(self, name)
            rule = 'must be the path of a Python object: "package.module:name"'
            require(f"model.{name}", value, ":" in value or not (value or name == "factory"), rule)
