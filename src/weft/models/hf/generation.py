"""generation_config.json: the sampling settings and end tokens of a published model."""

import json
from dataclasses import dataclass
from typing import Any

from weft.errors import ConversionError
from weft.models.generate import Sampling
from weft.models.hf.origin import Origin
from weft.models.hf.spelling import text_of

FILE = "generation_config.json"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None,),
    "typical_p": (None, 1.0),
    "min_p": (None, 0.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "constraints": (None,),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1.0),
    "sequence_bias": (None,),
    "stop_strings": (None,),
    "token_healing": (None, False),
    "top_h": (None,),
    "watermarking_config": (None,),
}
"""Generation settings that weft does not support, each with the values that switch it off."""
MOST_LIKELY = 50
"""The default top-k of transformers."""


@dataclass(frozen=True)
class Generation:
    """The generation settings of a model.

    `sampling`: the settings that weft supports. None if the model has no generation_config.json. `ends`: the ids of
    tokens that end a text. `not_followed`: the settings in generation_config.json that would have an effect but that
    weft does not support, each as "name=value".
    """

    sampling: Sampling | None = None
    ends: frozenset[int] = frozenset()
    not_followed: tuple[str, ...] = ()


def generation_of(origin: Origin | None) -> Generation:
    """Return the generation settings in the files of a model. Raises `ConversionError` for damaged files and invalid
    values. With `origin=None` all settings are empty."""
    if origin is None:
        return Generation()
    text = text_of(origin.raw)
    ends = _ends(text.get("eos_token_id", origin.raw.get("eos_token_id")), "config.json")
    if FILE not in origin.files:
        return Generation(None, ends)
    try:
        raw = json.loads(origin.files[FILE])
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{origin.directory / FILE} is not JSON ({error}): use an undamaged copy") from error
    if not isinstance(raw, dict):
        raise ConversionError(f"{origin.directory / FILE} contains no fields: use an undamaged copy")
    ends = _ends(raw["eos_token_id"], FILE) if raw.get("eos_token_id") is not None else ends
    strange = tuple(f"{name}={raw[name]!r}" for name, neutral in NEUTRAL.items() if raw.get(name) not in neutral)
    values = {name: raw[name] for name in ("top_k", "top_p", "temperature") if raw.get(name) is not None}
    values = {"top_k": MOST_LIKELY, **values} if raw.get("do_sample") else {"temperature": 0.0}
    if raw.get("repetition_penalty") is not None:
        values["repetition_penalty"] = raw["repetition_penalty"]
    try:
        return Generation(Sampling(**values), ends, strange)
    except (TypeError, ValueError) as error:
        raise ConversionError(f"{origin.directory / FILE}: {error}") from error


def _ends(given: Any, file: str) -> frozenset[int]:
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in ends):
        raise ConversionError(f"{file}: eos_token_id={given!r}: must be a token, or a list of tokens")
    return frozenset(ends)
