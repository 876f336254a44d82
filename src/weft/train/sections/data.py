"""[data]: what is trained on."""

from dataclasses import dataclass

from weft.train.sections.rules import require


@dataclass(frozen=True)
class DataConfig:
    """[data]: the text, how it becomes tokens, and how they are cut."""

    paths: tuple[str, ...] = ()
    """Text files or folders, relative to the working directory; empty: Python's standard library."""
    include: tuple[str, ...] = ("*",)
    """File name patterns that are taken from folders (files named in `paths` are always taken)."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face tokenizer.json."""
    sequence_length: int = 256
    """Tokens per sequence."""
    validation_fraction: float = 0.05
    """The part of the text that is kept for validation, between 0 and 1; the same text for every seed."""
    seed: int = 0
    """Seed of the order in which training sequences are seen."""
    cache_dir: str = ""
    """Where token files are kept; empty: weft's folder in the user's cache directory."""

    def __post_init__(self) -> None:
        require("data.sequence_length", self.sequence_length, self.sequence_length >= 1, "must be at least 1")
        require(
            "data.validation_fraction",
            self.validation_fraction,
            0 < self.validation_fraction < 1,
            "must lie strictly between 0 and 1; 0.05 keeps a twentieth of the text for validation",
        )
        require("data.seed", self.seed, 0 <= self.seed < 1 << 63, "must not be negative, and below 2**63")
        require(
            "data.include",
            list(self.include),
            bool(self.include),
            'must name at least one pattern; ["*"] takes every text file',
        )
        require(
            "data.include",
            list(self.include),
            bool(self.paths) or self.include == ("*",),
            "has no effect on the default text; name data.paths or leave data.include out",
        )
