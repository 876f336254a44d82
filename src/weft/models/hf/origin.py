"""The files of a loaded model besides its weights. The model keeps them so that `save` can write them again.

Among them are config.json, the tokenizer, the chat template and the generation settings.

If the text model is part of a larger model, the weights of the other parts are not loaded. They are copied from the
original directory when the model is saved in its original family.

A training run keeps these files and the weights of the other parts in its folder `origin`. This folder has weft's own
format, but lacks the weights of the text model.
"""

import dataclasses
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.directory import OURS, TensorFiles, TensorWriter, make_directory, names_in, write_json
from weft.models.hf.families import described, raw_of, read_ours
from weft.models.hf.family import Family, differences
from weft.models.hf.fields import KEPT, Raw
from weft.models.hf.spelling import Spelled, Spelling, full_text_of, text_of

COMING_ALONG = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template*", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("*.tiktoken", "tiktoken.model", "tekken.json", "*.bpe.model", "spiece.model", "LICENSE*", "NOTICE*", "README*"),
    "*.py",  # `auto_map` in config.json and tokenizer_config.json names these
)
OF_ANY = KEPT - {
    *("architectures", "auto_map", "model_type", "num_hidden_layers", "partial_rotary_factor", "rope_parameters"),
    *("rope_scaling", "rope_theta", "transformers_version"),
}
"""Fields that have the same meaning in the config.json of every family."""
BESIDE = "beside/"
"""In a directory of weft's own format, the names of weights that the text model does not use have this prefix."""


@dataclass(frozen=True, eq=False)
class Origin:
    """The files of a loaded model besides its weights, for use when the model is saved.

    - `family`: the `model_type` of the family.
    - `raw`: the content of config.json.
    - `spelling`: how the tensor names in the original Hugging Face files differ from those in the family's tables.
    - `directory`: the directory from which these files were read. It may have weft's own format.
    - `files`: maps the names of the other files, such as the tokenizer's, to their contents.
    - `beside`: the names of tensors that the text model does not use, such as those for images. They are not loaded:
      when the model is written, `copy_beside` copies them from `directory`.
    - `ignored`: the unknown fields of config.json that were ignored when the model was loaded.
    """

    family: str
    raw: Raw
    spelling: Spelling
    directory: Path
    files: Mapping[str, bytes] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def config_json(self, family: Family, cfg: HybridConfig, described_here: Raw) -> Raw:
        """Return the config.json to write for `cfg` in `family`.

        `described_here`: a new config.json for `cfg`. If the original config.json is of this family, return a copy of
        it in which the fields that describe the differences between the original model and `cfg` are those of
        `described_here`. If not, return `described_here` and add fields of the original to it: those that
        `described_here` lacks and that have the same meaning in every family.
        """
        theirs = text_of(self.raw)
        new = {name: value for name, value in theirs.items() if name in OF_ANY} | described_here
        if family.model_type != self.family:
            return new
        original = family.config(full_text_of(self.raw), family.projections(cfg), self.ignored)
        if not differences(cfg, original):
            return deepcopy(self.raw)
        before = family.raw(original)
        gone = before.keys() - described_here.keys()
        changed = {name: value for name, value in described_here.items() if before.get(name, gone) != value}
        same = {name: described_here.get(name) if value is None else value for name, value in theirs.items()}
        raw = self._around({name: value for name, value in same.items() if name not in gone} | changed, changed)
        try:
            fits = not differences(cfg, family.config(full_text_of(raw), family.projections(cfg), self.ignored))
        except ConversionError:
            fits = False
        return raw if fits else self._around(new, changed)  # for example, an older field may hide a changed one

    def _around(self, text: Raw, changed: Raw) -> Raw:
        """Return a copy of the original config.json with `text` as its text model. If the text model is part of a
        larger model, fields outside of it that repeat a `changed` field change too."""
        if text_of(self.raw) is self.raw:
            return text
        return {**self.raw, **{name: changed[name] for name in changed.keys() & self.raw.keys()}, "text_config": text}

    def write_files(self, target: Path) -> None:
        """Write `files` to the directory `target`. A file that already exists there is not changed."""
        for name, content in self.files.items():
            if not (path := target / name).exists():
                path.write_bytes(content)

    def copy_beside(self, writer: TensorWriter, *, ours: bool = False) -> None:
        """Copy the tensors in `beside` to `writer`, under their original names.

        `ours`: whether to add the prefix `BESIDE` to the names, as in a directory of weft's own format.
        """
        if not self.beside:
            return
        files = TensorFiles(self.directory)
        for name in self.beside:
            there = name if name in files else BESIDE + name
            writer.put(BESIDE + name if ours else name, files[there][...])

    def described(self) -> Raw:
        """Return the part of weft-model.json that describes the origin."""
        spelling = dataclasses.asdict(self.spelling)
        return {"family": self.family, "config": self.raw, "spelling": spelling, "ignored": list(self.ignored)}

    def keep(self, folder: Path, cfg: HybridConfig) -> None:
        """Write these files into `folder` in weft's own format, from which `origin_of` reads them. `cfg`: the model's
        configuration. If `folder` already has a weft-model.json, do nothing."""
        if (folder / OURS).exists():
            return
        make_directory(folder)
        if self.beside:
            with TensorWriter(folder) as writer:
                self.copy_beside(writer, ours=True)
        self.write_files(folder)
        write_json(folder / OURS, {"model": dataclasses.asdict(cfg), **self.described()})


def origin_of(directory: Path, ignored: Collection[str] = ()) -> Origin | None:
    """Return the `Origin` of the model in a directory. `ignored`: unknown fields of config.json to ignore.

    Return None if the directory has weft's own format and its weft-model.json does not contain a config.json.
    """
    files = _files_of(directory)
    if (directory / OURS).exists():
        saved = read_ours(directory)
        if not isinstance(saved.get("config"), dict):
            return None
        try:
            given = dict(saved["spelling"])
            memory = tuple((str(disk), str(name)) for disk, name in given.pop("memory"))
            spelling = Spelling(**given, memory=memory)
            model_type = str(saved["family"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConversionError(f"{directory / OURS} is damaged ({error!r}): use an undamaged copy") from error
        names = names_in(directory)
        beside = tuple(name.removeprefix(BESIDE) for name in names if name.startswith(BESIDE))
        return Origin(model_type, saved["config"], spelling, directory, files, beside, tuple(saved.get("ignored", ())))
    raw, names = raw_of(directory), names_in(directory)
    family, _, spelling = described(directory, raw, names, ignored)
    beside = tuple(Spelled(TensorFiles(directory), spelling).beside) if names else ()
    return Origin(family.model_type, raw, spelling, directory, files, beside, tuple(ignored))


def _files_of(directory: Path) -> dict[str, bytes]:
    found = {}
    for pattern in COMING_ALONG:
        for path in sorted(directory.glob(pattern)):
            if path.is_file():
                found[path.name] = path.read_bytes()
    return found
