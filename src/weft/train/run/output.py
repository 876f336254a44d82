"""Keeps a run alive if its output cannot be written: `weft train … | head`, a closed terminal, a full disk."""

import io
import sys


class _Steady(io.FileIO):
    def write(self, data: object) -> int:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type, return-value]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def outlive_readers() -> None:
    """Make stdout and stderr drop output that cannot be written, instead of raising an error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None:
            raw = _Steady(stream.fileno(), "w", closefd=False)
            steady = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=True)
            setattr(sys, name, steady)
