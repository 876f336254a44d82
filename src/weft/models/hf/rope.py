"""RoPE fields of a config.json: `rope_parameters`, or older `rope_theta`, `rope_scaling`, `partial_rotary_factor`."""

from collections.abc import Iterable
from typing import Any

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.fields import Raw

FULL, SLIDING = "full_attention", "sliding_attention"
"""The names, in `layer_types` and `rope_parameters`, of layers without and with a window."""
WITH_FIRST_CONTEXT = ("llama3", "yarn", "longrope", "dynamic")
"""RoPE types that need the context length of the original training."""


def read(raw: Raw, *, theta: float = 10000.0, partial: float | None = None, unused: Iterable[str] = ()) -> Raw:
    """Return the RoPE fields of `HybridConfig`. `theta`: the family's default base.

    `partial`: the family's default for the fraction of a head that is rotated, or None if the family rotates only whole
    heads. `unused`: RoPE parameters to ignore. If config.json has both `rope_parameters` and `rope_scaling`,
    `rope_scaling` applies, as in transformers.
    """
    return of_table(raw.get("rope_scaling") or raw.get("rope_parameters") or {}, raw, theta, partial, unused)


def of_table(table: Any, raw: Raw, theta: float, partial: float | None = None, unused: Iterable[str] = ()) -> Raw:
    """Return the RoPE fields of `HybridConfig` from one table, such as `rope_parameters`, of the config.json `raw`.

    `theta`, `partial`, `unused`: as for `read`.
    """
    if not isinstance(table, dict):
        raise ConversionError(f"rope_parameters={table!r}: must be an object")
    given = {name: value for name, value in table.items() if value is not None and name not in set(unused)}
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    kind = "longrope" if kind == "su" else kind  # longrope's name in its first releases
    given.pop("type", None)
    base = given.pop("rope_theta", None) or raw.get("rope_theta") or theta
    part = given.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor", partial) or 1.0
    for name, value in (("rope_theta", base), ("partial_rotary_factor", part)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConversionError(f"{name}={value!r}: must be a number")
    if partial is None and part != 1:
        raise ConversionError(f"partial_rotary_factor={part!r}: this family rotates whole heads")
    ours = {"rope_theta": float(base), "partial_rotary_factor": float(part), "rope_scaling": None}
    if kind == "default":
        return ours
    longest = raw.get("max_position_embeddings")
    if kind in WITH_FIRST_CONTEXT:
        outside = raw.get("original_max_position_embeddings")
        first = outside or given.get("original_max_position_embeddings") or longest
        if kind == "dynamic":  # for dynamic, transformers reads only max_position_embeddings
            first = longest
            given.pop("original_max_position_embeddings", None)
        if first is not None:
            given["original_max_position_embeddings"] = first
        if kind in ("yarn", "longrope") and "factor" not in given and first and longest:
            given["factor"] = longest / first
    return {**ours, "rope_scaling": {"rope_type": kind, **given}}


def write(cfg: HybridConfig, *, partial: bool = False) -> Raw:
    """Return the RoPE fields of config.json. `partial`: whether to write the fraction of a head that is rotated."""
    scaling = dict(cfg.rope_scaling or {"rope_type": "default"})
    outside = {}
    if scaling["rope_type"] == "dynamic":
        outside["max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    if partial:
        scaling["partial_rotary_factor"] = cfg.partial_rotary_factor
    return {**outside, "rope_parameters": {"rope_theta": cfg.rope_theta, **scaling}}


def by_layer_type(raw: Raw, theta: float, local: float) -> Raw:
    """Return the RoPE fields of `HybridConfig` for a family whose windowed layers have their own base and no scaling.

    `theta`: the default base of layers without a window. `local`: the default base of layers with a window.
    """
    given, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if "type" in older and "rope_type" not in older:
        raise ConversionError(f"rope_scaling={older}: transformers reads only rope_type here, not type; rename it")
    if strange := given.keys() - {FULL, SLIDING}:
        raise ConversionError(
            f"rope_parameters: has {', '.join(sorted(strange))} beside its tables {FULL!r} and {SLIDING!r}, which "
            f"transformers ignores: move them into one of the tables"
        )
    if given:
        ours = of_table({**(given.get(FULL) or {}), **older}, raw, theta)
        windowed = of_table(given.get(SLIDING) or {}, {**raw, "rope_theta": None}, local)
        if windowed["rope_scaling"] is not None:
            raise ConversionError(f"rope_parameters[{SLIDING!r}]={given[SLIDING]}: weft does not scale these layers")
        local = windowed["rope_theta"]
    else:
        ours = read(raw, theta=theta)
    alike = local == ours["rope_theta"] and ours["rope_scaling"] is None
    return {**ours, "rope_local_theta": None if alike else float(local)}


def write_by_layer_type(cfg: HybridConfig) -> Raw:
    """Return the RoPE fields of the config.json for `cfg`: the inverse of `by_layer_type`."""
    everywhere = {"rope_theta": cfg.rope_theta, **(cfg.rope_scaling or {"rope_type": "default"})}
    windowed = everywhere
    if cfg.rope_local_theta is not None:
        windowed = {"rope_theta": cfg.rope_local_theta, "rope_type": "default"}
    return {"rope_parameters": {FULL: everywhere, SLIDING: windowed}}
