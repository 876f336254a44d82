"""Converts Hugging Face files to weft's own format and back, tensor by tensor.

A directory in weft's own format has safetensors files with weft's tensor names, and the other files of the model:
tokenizer, chat template and generation settings. The file `weft-model.json` in it contains the configuration and the
original config.json.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.directory import OURS, THEIRS, TensorFiles, TensorWriter, write_json
from weft.models.hf.families import config_of, family_for, opened, read_ours, refuse_ignored
from weft.models.hf.family import shapes_of
from weft.models.hf.origin import Origin, origin_of
from weft.models.hf.places import Same, read_into, write
from weft.models.hf.spelling import Spelling
from weft.models.hf.weights import Renamed, check_fits
from weft.words import counted, listed


def convert(
    source: str | Path, target: str | Path, model_type: str | None = None, *, ignored: Collection[str] = ()
) -> str:
    """Convert Hugging Face files to weft's own format, or back. Return a line of text that describes the result.

    The format of the directory `source` determines the direction. Weights stay bit-exact. Tensors are copied one after
    another, so the whole model is never in memory.

    - `target`: a new or empty directory.
    - `ignored`: unknown fields of config.json to ignore. Only for the conversion of Hugging Face files.
    - `model_type`: the family to write. Only for the conversion back. Default: the family from which the model was
      converted. For a model that was not converted, the default is the first family that can represent it.

    Raises `ConfigError` if `source` does not exist, and `ConversionError` if the conversion is not possible. Some
    faults, such as copies of a tensor that differ, are noticed only after writing has begun. What was written is then
    deleted.
    """
    source, target = Path(source), Path(target)
    refuse_used(target)
    if (source / OURS).exists():
        refuse_ignored(source, ignored)
        return _from_ours(source, target, model_type)
    if model_type is not None:
        raise ConversionError(
            f"model_type={model_type!r} (--family): {source} is converted to weft's own format, which has no model type"
        )
    return _to_ours(source, target, ignored)


def refuse_used(target: Path) -> None:
    """Raise `ConversionError` if `target` is a directory that is not empty."""
    if target.is_dir() and any(target.iterdir()):
        raise ConversionError(f"{target} is not empty: convert into a new directory")


def _to_ours(source: Path, target: Path, ignored: Collection[str]) -> str:
    cfg = config_of(source, ignored=ignored)
    places, files = opened(source, cfg)
    check_fits(shapes_of(cfg), places, files)
    origin = origin_of(source, ignored)
    assert origin is not None
    with TensorWriter(target) as writer:
        for name, place in places.items():
            room = writer.room(name, place.shape(files), files.dtype(place.names[0]))
            read_into(room, place, files)
        origin.copy_beside(writer, ours=True)
    origin.write_files(target)
    write_json(target / OURS, {"model": dataclasses.asdict(cfg), **origin.described()})
    return f"{target}: {counted(len(places), 'tensor')} of {origin.family} in weft's own format, and {_listed(origin)}"


def _from_ours(source: Path, target: Path, model_type: str | None) -> str:
    cfg = HybridConfig(**read_ours(source)["model"])
    files, origin = TensorFiles(source), origin_of(source)
    family, raw = family_for(cfg, model_type or (origin.family if origin else None))
    own = origin is not None and origin.family == family.model_type
    spelling = origin.spelling if origin is not None and own else Spelling()
    places = family.places(cfg, fused=spelling.fused)
    check_fits(shapes_of(cfg), {name: Same(name) for name in places}, files)
    with TensorWriter(target) as writer:
        write(places, ((name, files[name][:]) for name in places), Renamed(writer, spelling))
        if origin is not None and own:
            origin.copy_beside(writer)
    if origin is not None:
        raw = origin.config_json(family, cfg, raw)
        origin.write_files(target)
    write_json(target / THEIRS, raw)
    return f"{target}: {counted(len(places), 'tensor')} as {family.model_type}, and {_listed(origin)}"


def _listed(origin: Origin | None) -> str:
    return listed(sorted(origin.files)) if origin is not None and origin.files else "no other files"
