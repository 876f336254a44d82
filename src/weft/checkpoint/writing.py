"""Writes the files of a checkpoint for Distributed Checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, WriteResult
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from weft.checkpoint.storage import operation, written


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
