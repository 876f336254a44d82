"""The list of supported families, and functions that find the family of a model."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from weft.checkpoint.storage import require_exists
from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.bamba import BAMBA
from weft.models.hf.deepseek_v3 import DEEPSEEK_V3
from weft.models.hf.directory import OURS, THEIRS, TensorFiles, names_in, read_json
from weft.models.hf.falcon_h1 import FALCON_H1
from weft.models.hf.family import Family, Raw, tensor_names
from weft.models.hf.gemma3 import GEMMA3
from weft.models.hf.glm4_moe import GLM4_MOE
from weft.models.hf.glm4_moe_lite import GLM4_MOE_LITE
from weft.models.hf.gpt_oss import GPT_OSS
from weft.models.hf.granite import GRANITE, GRANITE_MOE
from weft.models.hf.granite_hybrid import GRANITE_HYBRID
from weft.models.hf.kimi_linear import KIMI_LINEAR
from weft.models.hf.llama import LLAMA
from weft.models.hf.mamba2 import MAMBA2
from weft.models.hf.minimax_m2 import MINIMAX_M2
from weft.models.hf.mistral import MISTRAL
from weft.models.hf.mixtral import MIXTRAL
from weft.models.hf.nemotron_h import NEMOTRON_H
from weft.models.hf.olmo import OLMO2, OLMO3, OLMOE
from weft.models.hf.phi3 import PHI3
from weft.models.hf.places import Place, Same
from weft.models.hf.qwen2 import QWEN2, QWEN2_MOE
from weft.models.hf.qwen3 import QWEN3, QWEN3_MOE
from weft.models.hf.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from weft.models.hf.qwen3_next import QWEN3_NEXT
from weft.models.hf.smollm3 import SMOLLM3
from weft.models.hf.spelling import Spelled, Spelling, full_text_of, spelling_of, text_of
from weft.words import choice_of

QWEN = (QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
GLM = (GLM4_MOE, GLM4_MOE_LITE)
GRANITES = (BAMBA, GRANITE_HYBRID, GRANITE, GRANITE_MOE)
OTHERS = (NEMOTRON_H, MAMBA2, FALCON_H1, KIMI_LINEAR, GPT_OSS, MINIMAX_M2, OLMO2, OLMO3, OLMOE, SMOLLM3, PHI3, GEMMA3)
ALL = (LLAMA, MISTRAL, MIXTRAL, *QWEN, DEEPSEEK_V3, *GLM, *GRANITES, *OTHERS)
FAMILIES = {family.model_type: family for family in ALL}
"""Maps each `model_type` of a config.json to its `Family`. You may add entries."""
_NEAREST = 3
"""The number of families whose reasons are printed if no family can represent a model."""


def raw_of(directory: Path) -> Raw:
    """Return the content of the directory's config.json."""
    path = directory / THEIRS
    require_exists(directory, "name a model's directory")
    if not path.exists():
        raise ConversionError(f"{directory} has neither {THEIRS} nor {OURS}: it is not a model's directory")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ConversionError(f"{path} contains no fields: use an undamaged copy")
    return raw


def read_ours(directory: Path) -> Raw:
    """Return the content of the directory's weft-model.json. Its entry "model" has the fields of a `HybridConfig`."""
    saved = read_json(directory / OURS)
    try:
        HybridConfig(**saved["model"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConversionError(
            f"{directory / OURS} does not describe a model ({reason}): use an undamaged copy"
        ) from error
    return saved


def family_of(raw: Raw) -> Family:
    """Return the family for the `model_type` in the config.json `raw`. Raises `ConversionError` if there is none."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConversionError(f"model_type={kind!r}: {choice_of(str(kind), FAMILIES)}")
    return FAMILIES[kind]


def config_of(directory: str | Path, *, ignored: Collection[str] = ()) -> HybridConfig:
    """Return the configuration of the model in a directory of Hugging Face files or of weft's own format.

    `ignored`: unknown fields of config.json to ignore. Not for a directory of weft's own format.

    Raises `ConfigError` if the directory does not exist. Raises `ConversionError` for a missing or damaged
    configuration file, an unknown family, quantized weights, and a value that is invalid or that weft does not support.
    Also raises it for an unknown field that could change the result and is not in `ignored`.
    """
    directory = Path(directory)
    if (directory / OURS).exists():
        refuse_ignored(directory, ignored)
        return HybridConfig(**read_ours(directory)["model"])
    return described(directory, raw_of(directory), names_in(directory), ignored)[1]


def refuse_ignored(directory: Path, ignored: Collection[str]) -> None:
    """Raise `ConversionError` if fields are to be `ignored` in `directory`, which is in weft's own format."""
    if ignored:
        raise ConversionError(
            f"ignored={list(ignored)} (--ignore-field): {directory} is in weft's own format, which has no unknown "
            "fields; leave it out"
        )


def described(
    directory: Path, raw: Raw, names: Collection[str], ignored: Collection[str] = ()
) -> tuple[Family, HybridConfig, Spelling]:
    """Return three results. The first: the family of the config.json `raw`. The second: the configuration that `raw`
    describes. The third: the `Spelling` of `names`.

    `names`: the names of the tensors on disk. `ignored`: unknown fields of config.json to ignore.
    """
    try:
        text = full_text_of(raw)
        family = family_of(text)
        spelling = spelling_of(family, names)
        canonical = {found for name in names if (found := spelling.canonical(name)) is not None}
        return family, family.config(text, canonical, ignored), spelling
    except ConversionError as error:
        raise ConversionError(f"{directory / THEIRS}: {error}") from error


def opened(directory: Path, cfg: HybridConfig) -> tuple[dict[str, Place], Any]:
    """Return two mappings. The first maps weft's tensor names to `Place`s. The second maps the names in these places to
    the tensors in the directory.

    `cfg`: the model's configuration, which determines weft's names. The pattern of `cfg` may group the symbols
    differently from the pattern in the directory.
    """
    files = TensorFiles(directory)
    if (directory / OURS).exists():
        there = HybridConfig(**read_ours(directory)["model"])
        return dict(zip(tensor_names(cfg), map(Same, tensor_names(there)), strict=True)), files
    raw = raw_of(directory)
    family = family_of(text_of(raw))
    spelling = spelling_of(family, files)
    return family.places(cfg, fused=spelling.fused), Spelled(files, spelling)


def family_for(cfg: HybridConfig, model_type: str | None = None) -> tuple[Family, Raw]:
    """Return the first family that can represent `cfg`, and the content of this family's config.json for `cfg`.

    `model_type`: the only family to try. Default: all families are tried, in the order of `FAMILIES`. Raises
    `ConversionError` if `model_type` is unknown, or if none of the tried families can represent `cfg`.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ConversionError(f"model_type={model_type!r}: {choice_of(model_type, FAMILIES)}")
    reasons = []
    for name in [model_type] if model_type is not None else FAMILIES:
        try:
            return FAMILIES[name], FAMILIES[name].raw(cfg)
        except (ValueError, KeyError) as error:
            reasons.append(str(error))
    nearest = sorted(reasons, key=_distance)[:_NEAREST]
    among = f"; the nearest of {len(reasons)}" if len(reasons) > _NEAREST else ""
    raise ConversionError(f"no family can hold this model{among}: {'. '.join(nearest)}")


def _distance(reason: str) -> tuple[int, int]:
    """Return a sort key for the error of a family; the nearest family has the smallest key. A family that differs in
    few fields is near, and one that lacks many kinds of layers is far. All other errors are in between."""
    kinds = ("cannot hold", "", "has no layer")
    far = next((far for far, words in enumerate(kinds) if words and words in reason), 1)
    return far, reason.count("(it has") if far == 0 else reason.partition(" (pattern")[0].count(",")
