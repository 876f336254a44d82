"""Reads the files of a checkpoint for Distributed Checkpoint, and checks them while reading."""

import io
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from weft.checkpoint.loading import unpack
from weft.checkpoint.manifest import METADATA, CheckedFile, CheckpointError, Manifest, one_line, verify
from weft.checkpoint.metadata import read_metadata


def describe(checkpoint: Path, *, content: bool = False) -> tuple[Manifest, Metadata]:
    """Check a checkpoint's manifest, its metadata and the lengths of its files. Return the manifest and the metadata.

    With `content`, also compare all files with their checksums. Raises CheckpointError with the name of the checkpoint
    if a check fails.
    """
    manifest = verify(checkpoint, content=content)
    with CheckedFile(checkpoint, METADATA, manifest.files[METADATA]) as stream:
        whole = stream.readall()
    try:
        return manifest, read_metadata(whole, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint} cannot be trusted: {METADATA} {error}") from error


class Reader(dcp.FileSystemReader):
    """A reader for `dcp.load`. It checks the checksum of every block that it reads, and unpickles with `unpack`."""

    def __init__(self, checkpoint: Path, manifest: Manifest, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self.checkpoint, self.manifest, self.metadata = checkpoint, manifest, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            with CheckedFile(self.checkpoint, name, self.manifest.files[name]) as stream:
                # In file order, so that a block which two neighboring items share is read once.
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    place = self.storage_data[item.storage_index]
                    self._read(item, stream.cut_to(place.offset, place.length), planner, name)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, stream: CheckedFile, planner: LoadPlanner, name: str) -> None:
        key = item.storage_index.fqn
        try:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(stream.readall()))
                return
            part = _tensor(stream)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                part = part.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            if part.dtype != target.dtype or part.shape != target.shape:
                found, wanted = f"{part.dtype} {list(part.shape)}", f"{target.dtype} {list(target.shape)}"
                raise ValueError(f"it has {found} instead of {wanted}")
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
                raise
            raise CheckpointError(f"{self.checkpoint} cannot be used: {key} in {name}: {one_line(error)}") from error
        try:
            target.copy_(part)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the state: the checkpoint is not damaged
            raise RuntimeError(f"{key} of {self.checkpoint} cannot be loaded: {one_line(error)}") from error
        planner.commit_tensor(item, target)


def _tensor(stream: CheckedFile) -> torch.Tensor:
    loaded = unpack(cast(IO[bytes], stream))
    if type(loaded) is not torch.Tensor or loaded.layout != torch.strided:
        raise ValueError(f"it contains a {type(loaded).__name__}, not a tensor")
    return loaded


@contextmanager
def plain_errors(*, unchanged: bool = False) -> Iterator[None]:
    """In this context, the error of the lowest rank that failed replaces torch's CheckpointException, which holds the
    errors of all ranks. Without `unchanged`, any other error than CheckpointError becomes one, with the same message on
    one line."""
    try:
        yield
    except CheckpointException as error:
        first = min(error.failures.items())[1][0]
        if unchanged or isinstance(first, CheckpointError):
            raise first from first.__cause__
        raise CheckpointError(one_line(first)) from first
