"""Traces of a few steps by torch's profiler, and a count of the operations of a step."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

FOLDER = "profile"


class ProfilerWindow:
    """Profiles `steps` steps from step `first` on, and writes a trace of this rank. If `first` is 0, does nothing.

    A run that stops within these steps writes a trace of those that it ran, and a run that resumes within them writes
    another trace of the rest. The name of a trace has the steps that it contains.
    """

    def __init__(self, folder: Path, first: int, steps: int, rank: int) -> None:
        self.first, self.last = first, first + steps - 1
        self._folder, self._rank = folder / FOLDER, rank
        self._begun = self._done = 0
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if self.first and self._profiler is None and self.first <= step <= self.last:
            self._begun = step
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()

    def after(self, step: int, note: Callable[[str], None]) -> None:
        self._done = step
        if step == self.last:
            self.close(note)

    def close(self, note: Callable[[str], None]) -> None:
        """Stop the profiler if it runs, and write its trace. `note`: called with a line that names the file."""
        if self._profiler is not None:
            self._profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"steps-{self._begun}-{self._done}-rank-{self._rank}.json"
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
            note(f"a trace for chrome://tracing or Perfetto: {path}")


class Operations(TorchDispatchMode):
    """Counts multiplications and additions of torch's matrix products, convolutions and attention, in forward and
    backward.

    Operations that activation checkpointing repeats in backward are counted again. Operations inside kernels of other
    packages are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        packet = function._overloadpacket
        if packet in _MORE:
            self.counts[_name(packet)] += _MORE[packet](*arguments)
        elif packet in flop_registry:
            count: Any = flop_registry[packet]
            self.counts[_name(packet)] += count(*arguments, **(options or {}), out_val=result)
        return result

    def __str__(self) -> str:
        parts = [f"{name} {count / max(1, self.total):.0%}" for name, count in self.counts.most_common(4)]
        return f"{self.total / 1e12:.4g} x 10^12 operations ({', '.join(parts)})"


def _name(packet: Any) -> str:
    return str(packet).removeprefix("aten.").strip("_")


def _attention(query: Any, key: Any, value: Any, *_: Any) -> int:
    return sdpa_flop_count(query.shape, *_as_many_heads(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, *_as_many_heads(query, key, value))


def _grouped(one: Any, other: Any, *_: Any) -> int:
    matrices = one.shape[0] if one.ndim == other.ndim == 3 else 1  # otherwise the groups divide one of the dimensions
    return int(2 * matrices * one.shape[-2] * one.shape[-1] * other.shape[-1])


def _as_many_heads(query: Any, *others: Any) -> list[tuple[int, ...]]:
    """Return the shapes of `others`, [B, heads, S, C], with the number of heads of `query`. The FLOP formulas of torch
    2.11 do not support fewer heads of keys and values than of queries."""
    return [(each.shape[0], query.shape[1], *each.shape[2:]) for each in others]


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_MORE: dict[Any, Any] = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{direction}"): count
    for kernel in _KERNELS
    for direction, count in (("", _attention), ("_backward", _attention_backward))
} | {torch.ops.aten._grouped_mm: _grouped}
"""Formulas used in place of torch's. torch has no formulas for grouped products and for attention on CPU, and its
formulas for attention on CUDA do not support GQA in torch 2.11."""
