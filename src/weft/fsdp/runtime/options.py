"""The user's options for the runtime of a model, and the interface of the objects that the option `graphs` takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed import ProcessGroup

BUCKET_BYTES: int | None = None  # the default of `RuntimeOptions.bucket_bytes`


class CaptureTable(Protocol):
    """The captured graphs of one model's parts.

    - `failed`: per part, whether a capture failed on this rank since the last `agree`.
    - `agree`: allows replays of the parts without a failure. Its argument states, per part, whether a capture failed on
      any rank; with `check_collectives=False`, on this rank.
    """

    @property
    def failed(self) -> list[bool]: ...
    def agree(self, failed: Sequence[bool]) -> None: ...


@runtime_checkable
class Captures(Protocol):
    """The interface of `weft.Graphs`, the choice of parts to capture. `table`: makes the `CaptureTable` of `root`."""

    def table(self, root: nn.Module, engine: Any, device: torch.device) -> CaptureTable: ...


@dataclass(frozen=True)
class RuntimeOptions:
    """The options of a model's runtime. The root's options apply to all units of the model.

    - `separate_all_gather_group`: use separate communicators for gathers, so that gathers overlap with reductions.
      True: copies of the mesh's process groups. A list: process groups with the same ranks, to use in place of copies.
    - `allocator`: "trace" records the first step, and then places buffers in two slabs: one allocation for weights, one
      for gradients. "caching" allocates each buffer with torch's allocator before each use, and frees it after.
    - `prefetch_bytes`: the number of bytes of weights that may be gathered ahead. None: the next unit or bucket; in
      a schedule, two units.
    - `bucket_bytes`: adjacent units of at most this total size may share a message (0: none do). None: an eighth of the
      model, but at least the transport's latency times its bandwidth, and at most four times this product.
    - `max_live_reduce_buffers`: the number of units whose partial gradients may be live at once, including the unit
      whose backward runs. Units that share a message count as one. Gradients that wait for another backward or for
      their turn do not count. With 2, one unit is reduced while the next computes. With 1, there is no such overlap.
      On the CPU, a backward that may include several models does not have this limit.
    - `check_collectives`: after each backward that reduces gradients, the ranks compare their collectives, and agree on
      which parameters have gradients. False: they skip this exchange, in which hosts wait for each other. In that case,
      every rank must run the same units, and write to the same weights between the passes of a step. A parameter that
      no rank used gets a gradient of zeros, not None, if the backward of its unit ran.
    - `graphs`: a `weft.Graphs` that chooses the parts of the model to capture in graphs. None: no part. Graphs need
      `allocator="trace"`.
    """

    separate_all_gather_group: bool | Sequence[ProcessGroup] = False
    allocator: str = "trace"
    prefetch_bytes: int | None = None
    bucket_bytes: int | None = field(default_factory=lambda: BUCKET_BYTES)
    max_live_reduce_buffers: int = 2
    check_collectives: bool = True
    graphs: Captures | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.check_collectives, bool):
            raise TypeError(f"check_collectives={self.check_collectives!r}: choose True or False")
        separate = self.separate_all_gather_group
        if not isinstance(separate, bool):
            if not isinstance(separate, Sequence) or not all(isinstance(each, ProcessGroup) for each in separate):
                raise TypeError(
                    f"separate_all_gather_group={separate!r}: choose True or False, or pass a list of process groups"
                )
            object.__setattr__(self, "separate_all_gather_group", tuple(separate))
        for name, least, how in (
            ("max_live_reduce_buffers", 1, "an int of at least 1"),
            ("bucket_bytes", 0, "an int of 0 or more, 0 for none, or None for a size that depends on the transport"),
            ("prefetch_bytes", 0, "an int of 0 or more, or None for the next unit"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int if least else int | None):
                raise TypeError(f"{name}={value!r}: pass {how}")
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: pass {how}")
        if self.allocator not in ("trace", "caching"):
            raise ValueError(f"allocator={self.allocator!r}: choose 'trace' or 'caching'")
        if not isinstance(self.graphs, Captures | None):
            raise TypeError(f"graphs={self.graphs!r}: pass a weft.Graphs, or None")
        if self.graphs is not None and self.allocator == "caching":
            raise ValueError(
                "graphs with allocator='caching': a graph needs fixed addresses of weights, and these change from "
                "pass to pass; choose 'trace'"
            )

    def joined(self, given: "RuntimeOptions", now: "RuntimeOptions") -> "RuntimeOptions":
        """Return `self`, the options of a new root, with the changes that method calls have made to an inner model's
        options: from `given` to `now`. A changed `max_live_reduce_buffers` replaces the root's value if that is the
        default; otherwise the larger of the two applies."""
        buffers, separate = self.max_live_reduce_buffers, self.separate_all_gather_group
        if (changed := now.max_live_reduce_buffers) != given.max_live_reduce_buffers:
            is_default = buffers == RuntimeOptions.max_live_reduce_buffers
            buffers = changed if is_default else max(buffers, changed)
        if now.separate_all_gather_group != given.separate_all_gather_group:
            separate = separate or now.separate_all_gather_group
        return replace(self, max_live_reduce_buffers=buffers, separate_all_gather_group=separate)
