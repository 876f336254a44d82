"""Directories of safetensors files, with an index if there are several."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import ConversionError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
THEIRS, OURS = "config.json", "weft-model.json"
"""The configuration file in a directory of Hugging Face files, and in a directory of weft's own format."""
FILE_BYTES = 1 << 32
"""The largest number of bytes of tensors in a file. A larger tensor has a file for itself."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
}
"""The names of dtypes in safetensors files."""
OF_NAMES = {name: dtype for dtype, name in DTYPES.items()}
OF_WEIGHTS = ("F64", "F32", "F16", "BF16")
"""The dtypes that weights may have. Tensors of other dtypes need a scale, as float8 does, or are not weights."""


class TensorFiles:
    """Maps names to the tensors in a directory. `files[name]` reads no data. `files[name][a:b]` reads rows a to b."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if (directory / INDEX).exists():
            places = _read_index(directory / INDEX)
            if (directory / WEIGHTS).exists() and WEIGHTS not in places.values():
                raise ConversionError(
                    f"{directory} has both {WEIGHTS} and {INDEX}, which names other files: remove the older one"
                )
        elif (directory / WEIGHTS).exists():
            places = dict.fromkeys(_open(directory / WEIGHTS).keys(), WEIGHTS)
        else:
            raise ConversionError(f"{directory} has neither {WEIGHTS} nor {INDEX}: only safetensors files are read")
        self._places: dict[str, str] = places
        self._files: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, name: str) -> Any:
        """Return the safetensors slice of the tensor `name`: `[start:end]` reads rows, `get_shape()` reads no data."""
        if name not in self._places:
            raise ConversionError(f"{self.directory} has no tensor {name!r}")
        file = self._places[name]
        if file not in self._files:
            self._files[file] = _open(self.directory / file)
        try:
            return self._files[file].get_slice(name)
        except SafetensorError as error:
            raise ConversionError(
                f"{self.directory / file} has no tensor {name!r}, which {INDEX} looks for there: use an undamaged copy"
            ) from error

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises `ConversionError` if it is not fp64, fp32, fp16 or bf16."""
        kind = self[name].get_dtype()
        if kind not in OF_WEIGHTS:
            raise ConversionError(
                f"{self.directory / self._places[name]}: {name} has the dtype {kind}, which needs a scale or is not a "
                f"weight: use weights of {', '.join(OF_WEIGHTS)}"
            )
        return OF_NAMES[kind]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError, ValueError) as error:
        reason = "the file does not exist" if not path.exists() else " ".join(str(error).split())
        raise ConversionError(f"{path} is not a safetensors file ({reason}): use an undamaged copy") from error


def make_directory(path: Path) -> None:
    """Create a directory if it does not exist. Raises `ConversionError` if it cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConversionError(f"{path} cannot be created ({error.strerror}): name a new directory") from error


def names_in(directory: Path) -> frozenset[str]:
    """Return the names of the tensors in a directory, or an empty set if the directory has no weight files."""
    there = any((directory / name).exists() for name in (INDEX, WEIGHTS))
    return frozenset(TensorFiles(directory)) if there else frozenset()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises `ConversionError` if it is unreadable or invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversionError(f"{path} cannot be read ({error.strerror}): use an undamaged copy") from error
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not JSON ({error}): use an undamaged copy") from error


def write_json(path: Path, content: Any) -> None:
    """Write an indented JSON file. Equal content gives equal bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict):
        raise ConversionError(f"{path} has no weight_map: use an undamaged copy")
    for name, file in places.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise ConversionError(f"{path} looks for {name} in {file!r}, which is not a file in its directory")
    return places


class TensorWriter:
    """Writes tensors into safetensors files. Each file has at most `file_bytes` bytes of tensors, or one larger tensor.

    Use the writer in a `with` block, which creates the directory if it does not exist. The files get their final names
    at the end of the block. If the block raises, the files are deleted, and so is a directory that the block created.
    No tensor is held in memory: each tensor is copied into a memory-mapped region of a file.
    """

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self.directory = directory
        self.file_bytes = file_bytes
        self._files: list[_File] = []

    def put(self, name: str, tensor: Tensor) -> None:
        """Write `tensor` under `name`."""
        self.room(name, tensor.shape, tensor.dtype).copy_(tensor.detach())

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor that is memory-mapped to a file. Fill it before the `with` block ends."""
        size = math.prod(shape) * dtype.itemsize
        file = next((file for file in self._files if file.takes(size, dtype, self.file_bytes)), None)
        if file is None:
            file = _File(self.directory / f"part-{len(self._files) + 1:05}.safetensors")
            self._files.append(file)
        return file.room(name, shape, dtype)

    def __enter__(self) -> "TensorWriter":
        self._is_new = not self.directory.exists()
        make_directory(self.directory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for file in self._files:
                file.path.unlink(missing_ok=True)
            if self._is_new:
                self.directory.rmdir()
            return
        count = len(self._files)
        for file in self._files:
            file.finish()
        if count == 1:
            self._files[0].path.rename(self.directory / WEIGHTS)
            return
        names = {}
        for number, file in enumerate(self._files, start=1):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            file.path.rename(self.directory / name)
            names.update(dict.fromkeys(file.entries, name))
        size = sum(file.end for file in self._files)
        write_json(self.directory / INDEX, {"metadata": {"total_size": size}, "weight_map": names})


class _File:
    """A safetensors file that grows. It has 8 bytes for the header's length, then the JSON header, then the tensors.

    The header is written last, into a reserved space of `HEADER_BYTES`, padded with blanks.
    """

    HEADER_BYTES = 1 << 17

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        self.entries: dict[str, dict[str, Any]] = {}
        self._header_bytes = 100
        path.write_bytes(b"")

    def takes(self, size: int, dtype: torch.dtype, most: int) -> bool:
        """Return whether another tensor of `size` bytes fits into the file. It fits if all tensors together take at
        most `most` bytes, the header has room, and the tensor is aligned without a gap before it. safetensors forbids
        gaps."""
        aligned = self.end % dtype.itemsize == 0
        return aligned and self.end + size <= most and self._header_bytes < self.HEADER_BYTES - 2000

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        start, self.end = self.end, self.end + math.prod(shape) * dtype.itemsize
        kind = DTYPES[dtype]
        self.entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, self.end]}
        self._header_bytes += len(json.dumps({name: self.entries[name]}))
        if start == self.end:
            return torch.empty(tuple(shape), dtype=dtype)
        with self.path.open("r+b") as file:  # raises on a full disk; writing to mapped memory would get SIGBUS
            os.posix_fallocate(file.fileno(), 0, self.HEADER_BYTES + self.end)
        place = numpy.memmap(self.path, numpy.uint8, "r+", self.HEADER_BYTES + start, (self.end - start,))
        return torch.from_numpy(place).view(dtype).view(tuple(shape))

    def finish(self) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self.entries}).encode()
        room = self.HEADER_BYTES - 8
        with self.path.open("r+b") as file:
            file.write(room.to_bytes(8, "little") + header.ljust(room))
            file.truncate(self.HEADER_BYTES + self.end)
