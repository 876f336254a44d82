"""Loads a checkpoint into live state and reports keys that do not fit."""

import io
import pickletools
import zipfile
from collections.abc import Collection, Mapping
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from weft.errors import CheckpointMismatch
from weft.words import listed

_ZIP = b"PK\x03\x04"
"""The first bytes of a zip archive."""
Stored = TensorStorageMetadata | BytesStorageMetadata
SHOWN = 20
"""The largest number of keys in each list of an error message."""

_BARE_STORAGE = "torch.storage UntypedStorage"
"""The storage of tensors whose dtype has no storage class, such as float8."""
_NAMES = {
    *("_codecs encode", "collections Counter", "collections OrderedDict", "torch Size", "torch device"),
    *(f"{module} {name}" for module in ("__builtin__", "builtins") for name in ("complex", "set")),
    *(f"torch._utils _rebuild_{kind}" for kind in ("parameter", "tensor_v2", "tensor_v3")),
    _BARE_STORAGE,
    *(f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *(f"torch {name}" for name in vars(torch) if name.endswith("Storage")),
}
"""The globals that pickles of plain data and tensors need. `torch.load` allows more globals, such as `bytearray`, with
which a short pickle can allocate any number of bytes."""


class LoadPlanner(DefaultLoadPlanner):
    """A planner for `dcp.load` that fills tensors in place, and collects all other data in `loaded`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.loaded: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.loaded[read_item.dest_index.fqn] = unpack(value)


def unpack(stream: IO[bytes]) -> Any:
    """Return the data that `torch.save` wrote to `stream`. Functions and classes named in the data are called only if
    they are in `_NAMES`, and the memory used is at most proportional to the length of `stream`."""
    stream.seek(0)
    if stream.read(4) != _ZIP:  # torch would read other files as its legacy format
        raise ValueError("it is not in torch's zip format")
    with zipfile.ZipFile(stream) as archive:
        if archive.comment or min((entry.header_offset for entry in archive.infolist()), default=1):
            raise ValueError("it has bytes outside of its archive")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed")
        for entry in archive.infolist():
            if entry.filename.lower().endswith("data.pkl"):
                _check_names(archive.read(entry), sum(each.file_size for each in archive.infolist()))
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=True)


def _check_names(pickled: bytes, length: int) -> None:
    """Raise ValueError unless the pickle is safe to load. A safe pickle contains only globals in `_NAMES` and opcodes
    that checkpoints need. It allocates not much more memory than `length`, the bytes of all files in its archive."""
    calls = largest = 0
    has_bare_storages = False
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL" and argument not in _NAMES:
            raise ValueError(f"it names {str(argument).replace(' ', '.')}, which no checkpoint needs")
        if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            raise ValueError(f"it uses the opcode {opcode.name}, which no checkpoint needs")
        has_bare_storages |= opcode.name == "GLOBAL" and argument == _BARE_STORAGE
        calls += opcode.name in ("REDUCE", "NEWOBJ")
        largest = max(largest, argument) if isinstance(argument, int) else largest
    if has_bare_storages and calls * largest > 16 * length:  # each call may allocate as many bytes as its argument says
        raise ValueError(f"loading it could allocate {calls * largest} bytes, but the file has only {length}")


def compare(
    checkpoint: str, live: Mapping[str, Any], stored: Mapping[str, Stored], elsewhere: Collection[str] = ()
) -> None:
    """Raise CheckpointMismatch if the keys, shapes or dtypes of `live` differ from those of `stored`, or if a tensor of
    `live` has no memory.

    `elsewhere`: keys of other pipeline stages, which `stored` may contain too. Distributed Checkpoint itself ignores
    keys that are only in `stored`, and casts tensors of another dtype.
    """
    if empty := [key for key, value in live.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise CheckpointMismatch(
            f"{checkpoint} cannot be loaded into tensors on the meta device, which have no memory: "
            f"{listed(sorted(empty), SHOWN)}; allocate them first, for example with model.to_empty(device=...)"
        )
    complaints = []
    if missing := [key for key in live if key not in stored]:
        complaints.append(f"missing in the checkpoint: {listed(sorted(missing), SHOWN)}")
    if unexpected := [key for key in stored if key not in live and key not in elsewhere]:
        complaints.append(f"unexpected in the checkpoint: {listed(sorted(unexpected), SHOWN)}")
    if different := [
        f"{key} ({shape_of(stored[key])}, here {shape_of(value)})"
        for key, value in live.items()
        if key in stored and shape_of(stored[key]) != shape_of(value)
    ]:
        complaints.append(f"different: {listed(sorted(different), SHOWN)}")
    if complaints:
        raise CheckpointMismatch(
            f"{checkpoint} does not fit the model and options of this run: {'; '.join(complaints)}; "
            "load it with the configuration that it was saved with"
        )


def stored_below(metadata: Metadata, prefix: str) -> dict[str, Stored]:
    """Return the entries of `metadata` whose keys start with `prefix`, with the prefix removed from the keys."""
    return {
        key.removeprefix(prefix): value for key, value in metadata.state_dict_metadata.items() if key.startswith(prefix)
    }


def shape_of(value: Any) -> str:
    """Return the dtype and shape of a live or stored tensor, such as "float32 [8, 4]"; "no tensor" for other data."""
    if isinstance(value, TensorStorageMetadata):
        return f"{str(value.properties.dtype).removeprefix('torch.')} {list(value.size)}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "no tensor"
