r"""Writes the numbers of a run to metrics.jsonl, one JSON object per line, and to loggers.

{"step": 10, "kind": "train", "loss": 3.1, "lr": 0.0001, ...}
{"step": 100, "kind": "validation", "loss": 2.4, ...}
{"step": 100, "kind": "experts", "load": {"decoder.layers.0.mlp": [512, 498, ...], ...}, "exchanged": {...}}
{"step": 100, "kind": "sample", "text": "def read(self):\n ..."}
{"step": 100, "kind": "norms", "weight": {"lm_head.weight": 31.2, ...}, "gradient": {"lm_head.weight": 0.1, ...}}
{"step": 100, "kind": "quantization", "saturated": {"decoder.layers.0": 0.0, ...}, "underflowed": {...}}
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from weft.checkpoint.storage import WrittenFile
from weft.quantize import Shares
from weft.train.files import parse_json, replace_text
from weft.train.record.loggers import Logger, open_loggers

FILE = "metrics.jsonl"
_LONGEST = 64 << 20
"""The longest line that is read, in bytes. The norms of all parameters of a large model take a few million bytes."""


class Metrics:
    """Appends a run's numbers to metrics.jsonl and to its loggers.

    When `log` returns, its line is in the file even if the process is killed.

    - `resumed_step`: the step of the checkpoint from which the run resumes. Lines of later steps are removed, because
      the run will write them again. 0 removes all lines.
    - `enabled`: False writes nothing, for ranks other than 0.
    - `loggers`: the names in `run.loggers`.
    - `settings`: the run's settings, which each logger gets when it is created.
    """

    def __init__(
        self,
        run_directory: str | Path,
        enabled: bool = True,
        *,
        resumed_step: int = 0,
        loggers: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.note: str | None = None
        """A line to print if TensorBoard is missing; None otherwise."""
        self._file: Any = None
        self._loggers: list[Logger] = []
        if not enabled:
            return
        folder = Path(run_directory)
        folder.mkdir(parents=True, exist_ok=True)
        kept = [r for r in read_metrics(folder) if r["step"] <= resumed_step] if resumed_step else []
        replace_text(folder / FILE, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = WrittenFile(folder / FILE, "ab")
        self._loggers, self.note = open_loggers(loggers, folder, resumed_step, settings or {})

    def log(self, step: int, kind: Literal["train", "validation"], **values: float) -> None:
        """Write a line of numbers. Numbers that are not finite become null, which every JSON reader accepts."""
        if self._file is None:
            return
        self._write({"step": step, "kind": kind, **_readable(values)})
        self._scalars(step, {f"{kind}/{name}": value for name, value in values.items()})

    def log_experts(
        self, step: int, loads: dict[str, list[int]], exchanged: dict[str, list[int]] | None = None
    ) -> None:
        """Write a line with the number of assignments of each expert, by layer. Loggers get a histogram of each layer.

        `exchanged`: by layer, [number of assignments to experts on other ranks, number of token rows sent for them].
        """
        if self._file is None:
            return
        moved = {name: rows for name, rows in (exchanged or {}).items() if any(rows)}
        self._write({"step": step, "kind": "experts", "load": loads, **({"exchanged": moved} if moved else {})})
        for logger in self._loggers:
            for layer, load in loads.items():
                logger.histogram(step, f"experts/{layer}", load)

    def log_norms(self, step: int, weights: Mapping[str, float], gradients: Mapping[str, float]) -> None:
        """Write a line with the norms of each parameter and of its gradient. Loggers get each norm as a scalar."""
        if self._file is None:
            return
        self._write({"step": step, "kind": "norms", "weight": _readable(weights), "gradient": _readable(gradients)})
        for what, norms in (("weight", weights), ("gradient", gradients)):
            self._scalars(step, {f"{what}_norm/{name}": norm for name, norm in norms.items()})

    def log_quantization(self, step: int, shares: Mapping[str, Shares]) -> None:
        """Write a line with the fractions of saturated and underflowed weights in each unit. Loggers get scalars."""
        if self._file is None:
            return
        named = {what: {name: getattr(each, what) for name, each in shares.items()} for what in Shares._fields}
        self._write({"step": step, "kind": "quantization", **named})
        for what, by_unit in named.items():
            self._scalars(step, {f"{what}/{name}": share for name, share in by_unit.items()})

    def log_sample(self, step: int, text: str) -> None:
        """Write a line with a text that the model generated."""
        if self._file is not None:
            self._write({"step": step, "kind": "sample", "text": text})

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.scalars(step, values)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        """Flush and close. Afterwards `log` does nothing."""
        if self._file is not None:
            self._file.close()
        for logger in self._loggers:
            logger.close()
        self._file, self._loggers = None, []

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _readable(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def read_metrics(run_directory: str | Path) -> list[dict[str, Any]]:
    """Return the records in a run's metrics.jsonl, in the order of the file. Skips lines that a crash left incomplete,
    and lines that `Metrics` cannot have written."""
    records = []
    with suppress(FileNotFoundError), (Path(run_directory) / FILE).open("rb") as stream:
        # A line without a newline is incomplete, or longer than any that `Metrics` writes.
        while line := stream.readline(_LONGEST):
            if line.endswith(b"\n") and (record := _record(line.decode(errors="replace"))) is not None:
                records.append(record)
    return records


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and _is_whole(record) else None


def _is_whole(record: dict[str, Any]) -> bool:
    """Return whether `record` has the form of a record of `Metrics`."""
    if type(record.get("step")) is not int or not isinstance(kind := record.get("kind"), str):
        return False
    rest = [value for name, value in record.items() if name not in ("step", "kind")]
    if kind in ("experts", "norms", "quantization"):
        return all(isinstance(value, dict) and _are_numbers(list(value.values())) for value in rest)
    if kind == "sample":
        return list(record) == ["step", "kind", "text"] and isinstance(record["text"], str)
    return _are_numbers(rest)


def _are_numbers(values: list[Any]) -> bool:
    return all(
        _are_numbers(value) if isinstance(value, list) else value is None or type(value) in (int, float)
        for value in values
    )
