"""Ranks for tests on one GPU: real ones that share the card, and what ranks like this one would send.

A rehearsal (WEFT_REHEARSE=1) runs the same tests without a card: on CPU tensors over gloo, with checked streams.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import weft.debug
from weft.comm.transport import Pending

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where tests run: those without the mark `gpu` also where there is no GPU, so that they do not rot."""
REHEARSES = DEVICE == "cpu" and os.environ.get("WEFT_REHEARSE") == "1"
takes_time = pytest.mark.skipif(DEVICE == "cpu", reason="what takes time on a card takes none in a rehearsal")
CYCLES = 20_000_000
"""Of a GPU's clock: some ten milliseconds."""


def dawdle() -> None:
    """Keep the current stream busy for a while; without a GPU nothing runs behind the host's back."""
    if DEVICE == "cuda":
        torch.cuda._sleep(CYCLES)


def on_one_card(body, ranks: int, backend: str, tmp_path, *args) -> None:
    """Run `body(*args)` on `ranks` ranks that share the first card. Those of a rehearsal share this import, too."""
    arguments = (ranks, backend, str(tmp_path / "store"), body, args)
    mp.start_processes(_serve, arguments, ranks, start_method="fork" if REHEARSES else "spawn")


def _serve(rank: int, ranks: int, backend: str, store: str, body, args) -> None:
    if REHEARSES:
        torch.set_num_threads(1)
        backend = "gloo"
    else:
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        with weft.debug.check_streams() if REHEARSES else nullcontext():
            body(*args)
    finally:
        dist.destroy_process_group()


def all_gather_from_twins(full, source, group, tag) -> Pending:
    """What `collectives.all_gather` would bring if every rank had the same piece."""
    for part in full.chunk(group.size()):
        if part.data_ptr() != source.data_ptr():
            part.copy_(source)
    return Pending()


def reduce_scatter_over_twins(output, partial, group, tag, *, scale, accumulate, **options) -> Pending:
    """What `collectives.reduce_scatter` would do if every rank had the same gradients."""
    ranks = group.size()
    summed = ranks * scale * partial.view(ranks, -1)[group.rank()]
    output.copy_(output + summed if accumulate else summed)
    return Pending()


@contextmanager
def no_wait_of_the_host() -> Iterator[None]:
    """An error wherever torch makes the host wait for the device; waiting for an event is no such place."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
