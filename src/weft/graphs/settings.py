"""The user's settings of the parts to capture in graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

SCOPES = ("attn", "mamba", "mlp", "moe_router", "moe_preprocess", "experts", "finish")
BACKENDS = ("cuda", "tape")
Choice = Sequence[str] | Callable[[str, nn.Module], bool]

_REFUSED = {
    "full_iteration": "gathers and reductions of weights and the exchange of rows cannot be inside a graph",
    "moe": "it contains the exchange of rows between ranks; choose 'moe_router' and 'moe_preprocess'",
}


@dataclass(frozen=True)
class Settings:
    """The base class of `weft.Graphs`, with its fields and their checks."""

    scopes: tuple[str, ...] = SCOPES
    modules: Choice | None = None
    warmup: int = 3
    backend: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.scopes, str) or not isinstance(self.scopes, Sequence):
            raise TypeError(f"scopes={self.scopes!r}: pass a sequence of names, such as ('attn', 'moe_router')")
        object.__setattr__(self, "scopes", tuple(self.scopes))
        for scope in self.scopes:
            if scope in _REFUSED:
                raise ValueError(f"scopes has {scope!r}, which is never captured: {_REFUSED[scope]}")
            if scope not in SCOPES:
                raise ValueError(f"scopes has {scope!r}: choose among {', '.join(map(repr, SCOPES))}")
        if "moe_preprocess" in self.scopes and "moe_router" not in self.scopes:
            raise ValueError("scopes has 'moe_preprocess' without 'moe_router', whose result it sorts: name both")
        if isinstance(self.modules, str) or not (
            self.modules is None or callable(self.modules) or isinstance(self.modules, Sequence)
        ):
            raise TypeError(f"modules={self.modules!r}: pass a sequence of names or a predicate of name and module")
        if not self.scopes and not self.modules:
            raise ValueError("scopes=() and no modules: nothing would be captured; leave graphs out")
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 1:
            raise ValueError(f"warmup={self.warmup!r}: pass an int of at least 1; libraries initialize in eager passes")
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r}: choose among {', '.join(map(repr, BACKENDS))}, or None")
