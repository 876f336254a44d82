"""How a model's units run together: what the user may choose."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.distributed import ProcessGroup

from weft.fsdp.runtime.captures import Captures

BUCKET_BYTES: int | None = None
"""The default."""


@dataclass(frozen=True)
class RuntimeOptions:
    """How a model's units run together; the root's options count.

    `separate_all_gather_group`: gathers on a communicator of their own, so that they run beside reductions. True: one
    like the mesh's; process groups of your own, such as with NCCL options, serve the mesh axes with the same ranks.
    `allocator`: "trace" plans one slab for transient buffers from the first step, "caching" asks torch each time.
    `prefetch_bytes`: how many bytes of weights may be gathered ahead (None: the next unit).
    `bucket_bytes`: neighbouring units that are no larger together travel in one message. None: the size at which moving
    a message takes as long as its latency, by what the transport says of itself; 0: each unit by itself.
    `max_live_reduce_buffers`: how many units' partial gradients may be alive at once, those of the unit whose backward
    runs counted: with 2, one unit is reduced while the next computes; with 1, nothing is.
    `check_collectives`: agree after each backward on what every rank issued and which parameters have gradients. False:
    hosts never wait for each other; every rank must then run the same units, what is written to weights between the
    passes of a step must be written on all ranks, and a parameter that no rank used has a gradient of zeros, not None.
    `graphs`: a `weft.Graphs`: which parts of the model are captured in graphs and replayed. None: none.
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
        if isinstance(self.max_live_reduce_buffers, bool) or not isinstance(self.max_live_reduce_buffers, int):
            raise TypeError(f"max_live_reduce_buffers={self.max_live_reduce_buffers!r}: pass an int of at least 1")
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int | None):
            raise TypeError(f"bucket_bytes={self.bucket_bytes!r}: pass an int, 0 for none")
        if self.bucket_bytes is not None and self.bucket_bytes < 0:
            raise ValueError(f"bucket_bytes={self.bucket_bytes}: choose 0 or more")
        if isinstance(self.prefetch_bytes, bool) or not isinstance(self.prefetch_bytes, int | None):
            raise TypeError(f"prefetch_bytes={self.prefetch_bytes!r}: pass an int, or None for the next unit")
        if self.allocator not in ("trace", "caching"):
            raise ValueError(f"allocator={self.allocator!r}: choose 'trace' or 'caching'")
        if not isinstance(self.graphs, Captures | None):
            raise TypeError(f"graphs={self.graphs!r}: pass a weft.Graphs, or None")
        if self.graphs is not None and self.allocator == "caching":
            raise ValueError(
                "graphs with allocator='caching': a graph holds the addresses of weights, which change there from pass "
                "to pass; choose 'trace'"
            )
        if self.max_live_reduce_buffers < 1:
            raise ValueError(f"max_live_reduce_buffers={self.max_live_reduce_buffers}: at least 1 is needed")
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise ValueError(f"prefetch_bytes={self.prefetch_bytes}: choose 0 or more, or None for the next unit")

    def joined(self, given: "RuntimeOptions", now: "RuntimeOptions") -> "RuntimeOptions":
        """These options of a root that comes around a model whose methods have turned `given` into `now`: what was
        asked for there holds, with the most buffers that anyone asked for."""
        buffers, separate = self.max_live_reduce_buffers, self.separate_all_gather_group
        if now.max_live_reduce_buffers != given.max_live_reduce_buffers:
            buffers = max(buffers, now.max_live_reduce_buffers)
        if now.separate_all_gather_group != given.separate_all_gather_group:
            separate = separate or now.separate_all_gather_group
        return replace(self, max_live_reduce_buffers=buffers, separate_all_gather_group=separate)
