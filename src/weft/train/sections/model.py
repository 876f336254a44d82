"""[model] with a factory: your own model, by its import path."""

from dataclasses import dataclass, field

from weft.train.sections.rules import require


@dataclass(frozen=True)
class OwnModelConfig:
    """[model] for your own model, which the function `factory` builds. Such a section has no `pattern`."""

    factory: str
    """Import path of a function that builds an nn.Module: "package.module:function". It runs on the meta device."""
    loss: str = ""
    """Import path of `loss(model, microbatch)`; empty: the cross-entropy of the logits of `model(tokens)`."""
    options: dict = field(default_factory=dict)
    """Keyword arguments of `factory`."""

    def __post_init__(self) -> None:
        for name in ("factory", "loss"):
            value = getattr(self, name)
            rule = 'must be the path of a Python object: "package.module:name"'
            require(f"model.{name}", value, ":" in value or not (value or name == "factory"), rule)
