"""All families, and which of them a configuration belongs to."""

from pathlib import Path

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.bamba import BAMBA
from weft.models.hf.deepseek_v3 import DEEPSEEK_V3
from weft.models.hf.directory import OURS, THEIRS, names_in, read_json
from weft.models.hf.family import Family, Raw, tensor_names
from weft.models.hf.glm4_moe import GLM4_MOE
from weft.models.hf.gpt_oss import GPT_OSS
from weft.models.hf.granite_hybrid import GRANITE_HYBRID
from weft.models.hf.llama import LLAMA
from weft.models.hf.mixtral import MIXTRAL
from weft.models.hf.nemotron_h import NEMOTRON_H
from weft.models.hf.places import Place, Same
from weft.models.hf.qwen3 import QWEN3, QWEN3_MOE
from weft.models.hf.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from weft.models.hf.qwen3_next import QWEN3_NEXT

QWEN = (QWEN3, QWEN3_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
ALL = (LLAMA, MIXTRAL, *QWEN, DEEPSEEK_V3, GLM4_MOE, NEMOTRON_H, BAMBA, GRANITE_HYBRID, GPT_OSS)
FAMILIES = {family.model_type: family for family in ALL}


def raw_of(directory: Path) -> Raw:
    """The content of the directory's config.json."""
    try:
        raw = read_json(directory / THEIRS)
    except FileNotFoundError:
        raise ConversionError(f"{directory} has neither {THEIRS} nor {OURS}: it is no directory of a model") from None
    if not isinstance(raw, dict):
        raise ConversionError(f"{directory / THEIRS} holds no fields: take an undamaged copy")
    return raw


def read_ours(directory: Path) -> Raw:
    """The content of the directory's weft-model.json, with the fields of a `HybridConfig` under "model"."""
    saved = read_json(directory / OURS)
    try:
        HybridConfig(**saved["model"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConversionError(f"{directory / OURS} describes no model ({reason}): take an undamaged copy") from error
    return saved


def family_of(raw: Raw) -> Family:
    """The family that a config.json names."""
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ConversionError(f"model_type={kind!r}: there are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def config_of(directory: str | Path) -> HybridConfig:
    """The configuration of the model in a directory, of Hugging Face files or converted.

    Raises `ConversionError` for a family that is not there, for quantized weights, and for a field that would change
    the result and has no counterpart.
    """
    directory = Path(directory)
    if (directory / OURS).exists():
        return HybridConfig(**read_ours(directory)["model"])
    raw = raw_of(directory)
    return family_of(raw).config(raw, names_in(directory))


def places_of(directory: Path, cfg: HybridConfig) -> dict[str, Place]:
    """Where the tensors of a model of `cfg` stand in a directory, which may spell the same symbols in other groups."""
    if not (directory / OURS).exists():
        return family_of(raw_of(directory)).places(cfg)
    return dict(zip(tensor_names(cfg), map(Same, tensor_names(config_of(directory))), strict=True))


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
