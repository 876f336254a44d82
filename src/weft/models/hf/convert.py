"""From one directory to another, tensor by tensor: Hugging Face files into ours and back.

A directory of ours has safetensors files with our names, `weft-model.json` with the configuration, and what came along:
the fields that no result depends on, tokenizer and generation files.
"""

import dataclasses
import shutil
from pathlib import Path

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.directory import OURS, THEIRS, TensorFiles, TensorWriter, make_directory, write_json
from weft.models.hf.families import family_for, family_of, raw_of, read_ours
from weft.models.hf.family import KEPT, Raw
from weft.models.hf.places import Same, read_into, write
from weft.models.hf.weights import check_complete

COMING_ALONG = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template*", "LICENSE*", "README*"),
)


def convert(source: str | Path, target: str | Path, model_type: str | None = None) -> None:
    """Write the model in the directory `source` into the new directory `target`, in the other form.

    Bit-exact in both directions, from file to file: no weight is in memory as a whole. `model_type`: the family to
    write, by default the one that it came from, or the first that can hold it. Raises `ConversionError`.
    """
    source, target = Path(source), Path(target)
    if target.is_dir() and any(target.iterdir()):
        raise ConversionError(f"{target} is not empty: convert into a new directory")
    files = TensorFiles(source)
    if (source / OURS).exists():
        _from_ours(source, files, target, model_type)
    elif model_type is not None:
        raise ConversionError(f"model_type={model_type!r}: weft's own form, into which {source} goes, has none")
    else:
        _to_ours(source, files, target)
    for pattern in COMING_ALONG:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copy2(path, target / path.name)


def _to_ours(source: Path, files: TensorFiles, target: Path) -> None:
    raw = raw_of(source)
    family = family_of(raw)
    cfg = family.config(raw, files)
    places = family.places(cfg)
    check_complete(places, files)
    make_directory(target)
    with TensorWriter(target) as writer:
        for name, place in places.items():
            room = writer.room(name, place.shape(files), files.dtype(place.names[0]))
            read_into(room, place, files)
    kept = {name: value for name, value in raw.items() if name in KEPT | family.kept}
    write_json(target / OURS, {"model": dataclasses.asdict(cfg), "family": family.model_type, "kept": kept})


def _from_ours(source: Path, files: TensorFiles, target: Path, model_type: str | None) -> None:
    saved = read_ours(source)
    cfg = HybridConfig(**saved["model"])
    family, raw = family_for(cfg, model_type or saved.get("family"))
    places = family.places(cfg)
    check_complete({name: Same(name) for name in places}, files)
    make_directory(target)
    with TensorWriter(target) as writer:
        write(places, ((name, files[name][:]) for name in places), writer)
    kept: Raw = saved.get("kept", {}) if family.model_type == saved.get("family") else {}
    write_json(target / THEIRS, {**kept, **raw})
