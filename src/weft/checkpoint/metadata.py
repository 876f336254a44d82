"""Reads and checks `.metadata`, in which torch Distributed Checkpoint lists the tensors and where their parts are.

The file is a pickle, and an ordinary unpickler would call every function that the file names. The unpickler here
accepts only the few opcodes and classes of such a file.

The content is then checked: the parts of each tensor must make up the whole tensor. Every part must be in a file that
the manifest lists, and have the size that its shape and dtype need, or be at most 64 KiB larger.
"""

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from weft.checkpoint.manifest import CheckpointError, Manifest, one_line

_RECORDS = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
_NAMES = {
    *((record.__module__, record.__name__) for record in _RECORDS),
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__name__),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
)
_OVERHEAD = 1 << 16
"""The maximum number of bytes that a stored part of a tensor may take in addition to its elements."""
LONGEST_PLAIN = 1 << 28
"""The maximum number of bytes of an entry that is not a tensor."""


class _Opcodes(dict[int, Callable]):
    def __missing__(self, code: int) -> Callable:
        raise CheckpointError(f"uses the opcode {bytes([code])!r}, which no checkpoint needs")


class _Unpickler(pickle._Unpickler):
    # This uses pickle's Python implementation, because its table of opcodes can be restricted.
    dispatch = _Opcodes({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _NAMES:
            raise CheckpointError(f"names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)

    def load_build(self) -> None:
        if type(self.stack[-2]) not in _RECORDS:  # type: ignore[attr-defined]
            raise CheckpointError("changes an object other than its own records")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = load_build


def _member(enumeration: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """Return the member `name` of torch's enumeration of memory formats. Replaces `getattr`, which pickles of Python up
    to 3.11.2 call to get a member."""
    if enumeration is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise CheckpointError("asks for an attribute, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


def read_metadata(content: bytes, manifest: Manifest) -> Metadata:
    """Return the metadata in `content`, the bytes of `.metadata`, checked against the files that `manifest` lists.

    Of the functions and classes that `content` names, only those in `_NAMES` are called. Raises CheckpointError with a
    message such as "cannot be read: ...", to which the caller adds the name of the file.
    """
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot be read: {type(error).__name__}: {one_line(error)}") from error
    try:
        _check(metadata, manifest)
    except (AttributeError, TypeError, KeyError, OverflowError, ValueError) as error:
        raise CheckpointError(
            f"does not have the form that Distributed Checkpoint writes: {one_line(error)}"
        ) from error
    return metadata


def _check(metadata: Metadata, manifest: Manifest) -> None:
    places = {index: place for index, place in metadata.storage_data.items() if _is_place(place, manifest)}
    for key, entry in metadata.state_dict_metadata.items():
        _require(isinstance(key, str) and key.isprintable(), f"has the key {key!r}")
        if isinstance(entry, BytesStorageMetadata):
            _require(places[MetadataIndex(key)].length <= LONGEST_PLAIN, f"makes {key} too long")
            continue
        _require(isinstance(entry, TensorStorageMetadata), f"holds a {type(entry).__name__} under {key}")
        _require(isinstance(entry.properties.dtype, torch.dtype), f"gives {key} no dtype")
        _require(_are_counts(entry.size), f"gives {key} the shape {entry.size!r}")
        for chunk in entry.chunks:
            fits = (
                _are_counts(chunk.offsets, chunk.sizes)
                and len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
                and all(at + size <= whole for at, size, whole in zip(chunk.offsets, chunk.sizes, entry.size))
            )
            _require(fits, f"has a part of {key} that lies outside the tensor")
            takes = math.prod(chunk.sizes) * entry.properties.dtype.itemsize
            stored = places[MetadataIndex(key, chunk.offsets)].length
            _require(takes <= stored <= takes + _OVERHEAD, f"says that {takes} bytes of {key} are stored in {stored}")
        held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        _require(held == math.prod(entry.size), f"has {held} of the {math.prod(entry.size)} elements of {key}")
        _require(_are_disjoint(entry.chunks), f"has some elements of {key} twice")


def _is_place(place: _StorageInfo, manifest: Manifest) -> bool:
    file = manifest.files.get(place.relative_path)
    _require(file is not None, f"looks for parts in {place.relative_path!r}, which is not a file of the checkpoint")
    assert file is not None
    inside = _are_counts((place.offset, place.length)) and place.offset + place.length <= file.bytes
    _require(inside, f"looks for parts outside of {place.relative_path}")
    _require(not place.transform_descriptors, f"wants parts of {place.relative_path} transformed")
    return True


def _are_disjoint(chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether no element is in two of the chunks."""
    filled = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if all(chunk.sizes))
    for number, (offsets, sizes) in enumerate(filled):
        for others, other_sizes in filled[number + 1 :]:
            if others[0] >= offsets[0] + sizes[0]:
                break  # chunks are sorted: no later one overlaps either
            if all(
                one < other + its and other < one + own
                for one, own, other, its in zip(offsets, sizes, others, other_sizes)
            ):
                return False
    return True


def _are_counts(*rows: Any) -> bool:
    return all(isinstance(row, tuple) and all(type(value) is int and value >= 0 for value in row) for row in rows)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckpointError(one_line(CheckpointError(otherwise)))
