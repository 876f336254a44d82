"""The valid values of `HybridConfig.rope_scaling`: a `rope_type`, and the parameters that this type needs."""

from collections.abc import Mapping
from typing import Any

TYPES: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    ),
    "dynamic": ({"factor", "original_max_position_embeddings"}, set()),
    "longrope": ({"short_factor", "long_factor", "factor", "original_max_position_embeddings"}, {"attention_factor"}),
}
"""Maps each `rope_type` to the names of its required parameters, and of its optional parameters."""


def check_rope_scaling(scaling: Mapping[str, Any], pairs: int) -> None:
    """Raise ValueError if `scaling` is not valid for a rotation of `pairs` pairs of elements. The message states the
    rule that `scaling` breaks."""
    given = dict(scaling)
    kind = given.pop("rope_type", None)
    if not isinstance(kind, str) or kind not in TYPES:
        known = " or ".join(map(repr, TYPES))
        raise ValueError(f"rope_scaling={scaling!r}: rope_scaling must be a table whose rope_type is {known}")
    needed, more = TYPES[kind]
    if needed - given.keys() or given.keys() - needed - more:
        raise ValueError(
            f"rope_scaling={scaling!r}: rope_type {kind!r} needs {', '.join(sorted(needed)) or 'nothing'}"
            f"{', may have ' * bool(more)}{', '.join(sorted(more))}, and nothing else"
        )
    if kind == "dynamic" and pairs < 2:
        raise ValueError(f"rope_scaling={scaling!r}: rope_type 'dynamic' needs at least 2 rotated pairs, not {pairs}")
    for name, value in given.items():
        if name == "truncate":
            fits, rule = isinstance(value, bool), "True or False"
        elif name in ("short_factor", "long_factor"):
            fits = isinstance(value, list | tuple) and len(value) == pairs and all(map(_is_positive, value))
            rule = f"{pairs} positive numbers, one for each rotated pair"
        else:
            fits, rule = _is_positive(value), "a positive number"
        if not fits:
            raise ValueError(f"rope_scaling[{name!r}]={value!r}: {name} must be {rule}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0 and value > 0
