"""Rotation in a config.json: `rope_parameters`, or older `rope_theta`, `rope_scaling` and `partial_rotary_factor`."""

from weft.models.config import HybridConfig
from weft.models.hf.family import Raw


def read(raw: Raw, *, theta: float = 10000.0, partial: float = 1.0) -> Raw:
    """Our fields; `theta`, `partial`: the family's defaults."""
    given = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    base = given.pop("rope_theta", None) or raw.get("rope_theta") or theta
    part = given.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or partial
    numbers = {name: value for name, value in given.items() if value is not None}
    scaling = {"rope_type": kind, **numbers} if kind != "default" else None
    return {"rope_theta": float(base), "partial_rotary_factor": float(part), "rope_scaling": scaling}


def write(cfg: HybridConfig, *, partial: bool = False) -> Raw:
    """Theirs. `partial`: whether the family rotates parts of heads."""
    scaling = dict(cfg.rope_scaling or {"rope_type": "default"})
    if partial:
        scaling["partial_rotary_factor"] = cfg.partial_rotary_factor
    return {"rope_parameters": {"rope_theta": cfg.rope_theta, **scaling}}
