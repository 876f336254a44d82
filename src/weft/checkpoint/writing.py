"""Writes the files of a checkpoint with Distributed Checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, WriteResult
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from weft.checkpoint import probe
from weft.checkpoint.manifest import METADATA, File, Manifest
from weft.checkpoint.ranks import Ranks
from weft.checkpoint.reading import plain_errors
from weft.checkpoint.staging import Staged
from weft.checkpoint.storage import operation, written


def write(staged: Staged, folder: Path, ranks: Ranks, *, step: int, run: str) -> Manifest:
    """Write `staged`, the state of this rank, to `folder`, which the first rank has made. Return the manifest, which
    describes the files of all ranks. `run`: the identity of the run. Collective.

    Raises CheckpointError if a rank does not see the folder, or if a write fails.
    """
    unseeing = [rank for rank, sees in enumerate(ranks.of_all(folder.is_dir())) if not sees]
    if unseeing:
        raise probe.blind(unseeing, folder)
    with plain_errors():
        dcp.save(
            {},
            storage_writer=Writer(folder),
            planner=staged,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    return Manifest(step, ranks.size, _measure(folder, ranks), run=run)


def _measure(folder: Path, ranks: Ranks) -> dict[str, File]:
    """Return the `File` of each file by name. Each rank computes the checksums of the files that it wrote."""
    own: dict[str, File] | OSError
    try:
        own = {path.name: File.measure(path) for path in folder.glob(f"__{ranks.rank}_*")}
        if ranks.rank == 0:
            own[METADATA] = File.measure(folder / METADATA)
    except OSError as error:
        own = error
    files: dict[str, File] = {}
    for part in ranks.of_all(own):
        if isinstance(part, OSError):
            raise part
        files |= part
    return files


class _Files(FileSystem):
    """Writes and renames files as recorded operations (see `weft.checkpoint.storage`), so that the watchdog can name
    one that hangs. Each file that was written is flushed to the disk when it is closed."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with written(Path(path), mode) as stream:
            yield stream

    def rename(self, path: Any, new_path: Any) -> None:
        with operation("rename", path):
            super().rename(path, new_path)


class Writer(dcp.FileSystemWriter):
    """A writer for `dcp.save`. If a write fails, this writer raises the OSError that caused the failure. torch's own
    writer would only report a wrong length."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False)  # `_Files` flushes instead
        self.fs = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None
