"""All families, and which of them a configuration belongs to."""

import json
from pathlib import Path

from weft.models.config import HybridConfig
from weft.models.hf.deepseek_v3 import DEEPSEEK_V3
from weft.models.hf.errors import ConversionError
from weft.models.hf.family import Family, Raw
from weft.models.hf.llama import LLAMA
from weft.models.hf.mixtral import MIXTRAL
from weft.models.hf.nemotron_h import NEMOTRON_H
from weft.models.hf.qwen3_next import QWEN3_NEXT

FAMILIES = {family.model_type: family for family in (LLAMA, MIXTRAL, DEEPSEEK_V3, NEMOTRON_H, QWEN3_NEXT)}


def raw_of(directory: Path) -> Raw:
    """The content of the directory's config.json."""
    try:
        return json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise ConversionError(f"{directory} has no config.json: it is no directory of a Hugging Face model") from None


def family_of(raw: Raw) -> Family:
    """The family that a config.json names."""
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ConversionError(f"model_type={kind!r}: there are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def config_of(directory: str | Path) -> HybridConfig:
    """The configuration of the model in a Hugging Face directory.

    Raises `ConversionError` for a family that is not there, for quantized weights, and for a field that would change
    the result and has no counterpart.
    """
    raw = raw_of(Path(directory))
    return family_of(raw).config(raw)


def family_for(cfg: HybridConfig, model_type: str | None = None) -> tuple[Family, Raw]:
    """A family that can hold a model of `cfg`, the one that is named or the first that can, and its config.json."""
    if model_type is not None and model_type not in FAMILIES:
        raise ConversionError(f"model_type={model_type!r}: there are {', '.join(FAMILIES)}")
    reasons = []
    for name in [model_type] if model_type is not None else FAMILIES:
        try:
            return FAMILIES[name], FAMILIES[name].raw(cfg)
        except (ValueError, KeyError) as error:
            reasons.append(str(error))
    raise ConversionError(f"no family can hold this model: {'. '.join(reasons)}")
