"""A directory of safetensors files, with an index where there are several."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.models.hf.errors import ConversionError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
THEIRS, OURS = "config.json", "weft-model.json"
"""What describes the model, in a directory of theirs and of ours."""
FILE_BYTES = 1 << 29
"""What a file holds at most, unless one tensor is larger: what a writer keeps in memory."""


class TensorFiles:
    """The tensors of a directory, of which nothing is read before it is asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if (directory / INDEX).exists():
            places = _read_index(directory / INDEX)
        elif (directory / WEIGHTS).exists():
            with safe_open(directory / WEIGHTS, "pt") as file:
                places = dict.fromkeys(file.keys(), WEIGHTS)
        else:
            raise ConversionError(f"{directory} has neither {WEIGHTS} nor {INDEX}: only safetensors files are read")
        self._places: dict[str, str] = places
        self._files: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, name: str) -> Any:
        """A slice of the tensor `name`: `[start:end]` reads rows, `get_shape()` reads nothing."""
        if name not in self._places:
            raise ConversionError(f"{self.directory} has no tensor {name!r}")
        file = self._places[name]
        if file not in self._files:
            self._files[file] = safe_open(self.directory / file, "pt")
        return self._files[file].get_slice(name)


def read_json(path: Path) -> Any:
    """Raises `ConversionError` for what is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is no JSON ({error}): take an undamaged copy") from error


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ConversionError(f"{path} has no weight_map: take an undamaged copy")
    for name, file in places.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise ConversionError(f"{path} looks for {name} in {file!r}, which is no file beside it")
    return places


class TensorWriter:
    """Writes tensors into files of limited size; the directory is complete when the `with` block ends."""

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self.directory = directory
        self.file_bytes = file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._written: list[list[str]] = []

    def put(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, and write a file if it would not hold one more."""
        if self._waiting and self._bytes + tensor.nbytes > self.file_bytes:
            self._flush()
        self._waiting[name] = tensor.detach().cpu().contiguous()
        self._bytes += tensor.nbytes

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        self._flush()
        count = len(self._written)
        if count == 1:
            self._part(1).rename(self.directory / WEIGHTS)
            return
        names = {}
        for number, tensors in enumerate(self._written, start=1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            self._part(number).rename(self.directory / file)
            names.update(dict.fromkeys(tensors, file))
        index = {"metadata": {"total_size": self._total}, "weight_map": names}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        self._written.append(list(self._waiting))
        save_file(self._waiting, self._part(len(self._written)), metadata={"format": "pt"})
        self._waiting = {}
        self._total += self._bytes
        self._bytes = 0

    def _part(self, number: int) -> Path:
        return self.directory / f"part-{number:05}.safetensors"
