"""[data]: the training and validation data."""

from dataclasses import dataclass
from typing import Literal

from weft.train.sections.rules import require
from weft.train.toml_values import plain, show


@dataclass(frozen=True)
class DataConfig:
    """[data]: the text, how it is tokenized, and how tokens are divided into sequences."""

    kind: Literal["text", "jsonl", "messages", "parquet", "datasets", "tokens"] = "text"
    """Format: "text", "jsonl", "messages" (chats, JSON lines), "parquet", "datasets" (save_to_disk) or "tokens"."""
    paths: tuple[str, ...] = ()
    """Files or folders, relative to the working directory; empty: Python's standard library."""
    include: tuple[str, ...] = ("*",)
    """Patterns of file names to read from folders (files named in `paths` are always read)."""
    field: str = "text"
    """Field that holds the text of a record (jsonl, parquet, datasets). For "messages", the default is "messages"."""
    weights: tuple[float, ...] = ()
    """Mixing weights: how often sequences of each of `paths` occur; empty: all `paths` together are one text."""
    separator: str = ""
    """Text to append to each document, such as the tokenizer's end token; empty: none."""
    packing: Literal["stream", "whole"] = "stream"
    """"stream": documents follow each other and are cut anywhere; "whole": only documents that are too long are cut."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """With `kind = "tokens"`: dtype of files other than .npy."""
    validation_paths: tuple[str, ...] = ()
    """Files or folders of the text to validate on; empty: a part of `paths`."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face tokenizer.json."""
    sequence_length: int = 256
    """Tokens per sequence."""
    validation_fraction: float = 0.05
    """Fraction of the text that is held out for validation. The held-out text is the same for every seed."""
    seed: int = 0
    """Seed of the order of the training sequences."""
    factory: str = ""
    """With `model.factory`: path of a function (rank, ranks) -> iterable of microbatches, which replaces the text."""
    validation_factory: str = ""
    """With `factory`: the same kind of function for the validation data."""
    cache_dir: str = ""
    """Cache folder for tokenized texts; empty: weft's folder in the user's cache directory."""

    def __post_init__(self) -> None:
        require("data.sequence_length", self.sequence_length, self.sequence_length >= 1, "must be at least 1")
        require(
            "data.validation_fraction",
            self.validation_fraction,
            0 < self.validation_fraction < 1,
            "must lie strictly between 0 and 1; 0.05 keeps a twentieth of the text for validation",
        )
        require("data.seed", self.seed, 0 <= self.seed < 1 << 63, "must be from 0 to 2**63 - 1")
        require(
            "data.include",
            list(self.include),
            bool(self.include),
            'must name at least one pattern; ["*"] selects every text file',
        )
        for name in ("include", "kind", "weights", "validation_paths"):
            value = getattr(self, name)
            without = "has no effect on the default text; name data.paths or leave it out"
            require(f"data.{name}", plain(value), bool(self.paths) or value == getattr(DataConfig, name), without)
        self._require_kind("field", ("jsonl", "messages", "parquet", "datasets"))
        self._require_kind("token_dtype", ("tokens",))
        self._require_kind("separator", ("text", "jsonl", "parquet", "datasets"))
        for name in ("tokenizer", "packing"):
            self._require_kind(name, ("text", "jsonl", "messages", "parquet", "datasets"))
        require(
            "data.tokenizer",
            self.tokenizer,
            self.kind != "messages" or self.tokenizer != "bytes",
            'must be the path of a tokenizer.json with a chat template in the same folder, for data.kind = "messages"',
        )
        require(
            "data.weights",
            list(self.weights),
            not self.weights or (len(self.weights) == len(self.paths) and min(self.weights) > 0),
            f"must be one positive number for each of the {len(self.paths)} data.paths",
        )
        require(
            "data.validation_fraction",
            self.validation_fraction,
            not self.validation_paths or self.validation_fraction == DataConfig.validation_fraction,
            "has no effect with data.validation_paths; leave one of the two out",
        )

        for name in ("factory", "validation_factory"):
            value = getattr(self, name)
            rule = 'must be the path of a function: "package.module:function"'
            require(f"data.{name}", value, not value or ":" in value, rule)
        require(
            "data.validation_factory",
            self.validation_factory,
            bool(self.factory) or not self.validation_factory,
            "has no effect without data.factory; set that, or leave it out",
        )

    @property
    def record_field(self) -> str:
        """The field that holds the text or the messages of a record."""
        return "messages" if self.kind == "messages" and self.field == DataConfig.field else self.field

    def _require_kind(self, name: str, kinds: tuple[str, ...]) -> None:
        value = getattr(self, name)
        rule = f"has no effect with data.kind = {show(self.kind)}; leave it out, or choose from {kinds}"
        require(f"data.{name}", value, self.kind in kinds or value == getattr(DataConfig, name), rule)
