"""Describes how the tensor names in a directory differ from the names in a family's tables.

difference         name in the tables                  name in the directory
-----------------  ----------------------------------  ---------------------------------------------------------------
nested text model  model.layers.0...                   model.language_model.layers.0..., config.json has text_config
nested, Gemma 3    model.layers.0..., lm_head          language_model.model.layers.0..., language_model.lm_head
state_dict() file  such as block_sparse_moe.           such as mlp.: the names that transformers uses in memory
fused experts      experts.0.gate_proj.weight, ...     experts.gate_up_proj, experts.down_proj, for all experts
other weights      none                                image and sound weights of a larger model: `beside`
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.errors import ConversionError
from weft.models.hf.family import Family
from weft.models.hf.fields import Raw

NESTED = "model.language_model."
OF_TEXT = (NESTED, "lm_head.", "mtp.")
OUTSIDE = "language_model."
UNUSED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Matches the names of tensors that older releases of transformers store. weft computes these tensors instead."""


@dataclass(frozen=True)
class Spelling:
    """The differences between the tensor names in one directory and those in the family's tables.

    - `nested`: whether the directory has `model.language_model.` where names in the tables begin with `model.`.
    - `outside`: whether names in the directory have the prefix `language_model.` before the name in the tables.
    - `fused`: whether a tensor in the directory stacks the matrices of all experts.
    - `memory`: pairs (part of a name in the tables, the part that replaces it in the directory).
    """

    nested: bool = False
    fused: bool = False
    memory: tuple[tuple[str, str], ...] = ()
    outside: bool = False

    def theirs(self, name: str) -> str:
        """Return a tensor's name in the directory. `name`: the tensor's name in the tables."""
        for disk, memory in self.memory:
            name = name.replace(disk, memory)
        if self.nested and name.startswith("model."):
            return NESTED + name.removeprefix("model.")
        return OUTSIDE + name if self.outside else name

    def canonical(self, name: str) -> str | None:
        """Return a tensor's name in the tables, or None if the text model does not use the tensor. `name`: the tensor's
        name in the directory."""
        if UNUSED.search(name) or (self.nested and not name.startswith(OF_TEXT)):
            return None
        if self.outside and not name.startswith(OUTSIDE):
            return None
        name = name.removeprefix(OUTSIDE) if self.outside else name
        if self.nested and name.startswith(NESTED):
            name = "model." + name.removeprefix(NESTED)
        for disk, memory in self.memory:
            name = name.replace(memory, disk)
        return name


def spelling_of(family: Family, names: Iterable[str]) -> Spelling:
    """Return the `Spelling` of `names`, the names of the tensors in a directory."""
    names = list(names)
    nested = any(name.startswith(NESTED) for name in names)
    fused = any(re.search(r"\.experts\.(gate_up|up|down)_proj$", name) for name in names)
    in_memory = family.memory if family.memory and _are_in_memory(family, names) else ()
    return Spelling(nested, fused, in_memory, any(name.startswith(OUTSIDE) for name in names))


class Spelled:
    """Maps names in the family's tables to the tensors in a directory. It has only the tensors of the text model."""

    def __init__(self, files: Any, spelling: Spelling) -> None:
        self.files, self.spelling = files, spelling
        self.directory = files.directory
        self._names = {canonical: name for name in files if (canonical := spelling.canonical(name)) is not None}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Any:
        return self.files[self._names.get(name, name)]

    def dtype(self, name: str) -> Any:
        """Return the dtype of a tensor. Raises `ConversionError` if it is not fp64, fp32, fp16 or bf16."""
        return self.files.dtype(self._names.get(name, name))

    @property
    def beside(self) -> list[str]:
        """The names of weights outside of the text model, such as those of a vision tower."""
        return [each for each in self.files if self.spelling.canonical(each) is None and not UNUSED.search(each)]


def text_of(raw: Raw) -> Raw:
    """Return the part of config.json that describes the text model: `text_config` if it is a table with a `model_type`,
    otherwise `raw`."""
    text = raw.get("text_config")
    return text if isinstance(text, dict) and "model_type" in text else raw


def full_text_of(raw: Raw) -> Raw:
    """Return `text_of(raw)`. If it lacks `quantization_config` or `tie_word_embeddings`, take the field from `raw`.

    Raises `ConversionError` if `raw` and its `text_config` set one of these fields to different values.
    """
    text = text_of(raw)
    if text is raw:
        return raw
    text = dict(text)
    for name in ("quantization_config", "tie_word_embeddings"):
        if name in raw and text.setdefault(name, raw[name]) != raw[name]:
            raise ConversionError(f"{name}={raw[name]!r}, and {text[name]!r} in text_config: correct one")
    return text


def _are_in_memory(family: Family, names: list[str]) -> bool:
    disk, memory = family.memory[0]
    return not any(disk in name for name in names) and any(memory in name for name in names)
