"""Lets a run continue if its output cannot be written: `weft train … | head`, a closed terminal, a full disk."""

import io
import os
import select
import sys
from contextlib import suppress


class _Steady(io.FileIO):
    def write(self, data: object) -> int:  # type: ignore[override]
        with suppress(OSError):
            # `write` returns None if another program made the terminal non-blocking and its buffer is full.
            while (written := super().write(data)) is None:  # type: ignore[arg-type]
                select.select([], [self], [])
            return written
        return memoryview(data).nbytes  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Make stdout and stderr drop output that cannot be written, instead of raising an error."""
    _keep_free()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None:
            raw = _Steady(stream.fileno(), "w", closefd=False)
            steady = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=True)
            setattr(sys, name, steady)


def _keep_free() -> None:
    """Open the file descriptors 0 to 2 if they are closed. Otherwise a file of the run could get one of these numbers,
    and libraries would print their warnings into that file."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
