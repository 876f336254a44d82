"""Ranks for tests on one GPU: real ones that share the card, or pretended ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.comm.collectives import Pending

CYCLES = 20_000_000
"""Of a GPU's clock: some ten milliseconds."""


def on_one_card(body, ranks: int, backend: str, tmp_path, *args) -> None:
    """Run `body(*args)` on `ranks` ranks that share the first card."""
    mp.spawn(_serve, args=(ranks, backend, str(tmp_path / "store"), body, args), nprocs=ranks)


def _serve(rank: int, ranks: int, backend: str, store: str, body, args) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        body(*args)
    finally:
        dist.destroy_process_group()


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """A process group of which the other ranks, and all communication, are pretended."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_gather_from_twins(full: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, tag: int) -> Pending:
    """What `collectives.all_gather` would bring if every rank had the same piece."""
    for part in full.chunk(group.size()):
        if part.data_ptr() != source.data_ptr():
            part.copy_(source)
    return Pending()


def reduce_scatter_over_twins(
    output: torch.Tensor,
    partial: torch.Tensor,
    group: dist.ProcessGroup,
    tag: int,
    *,
    scale: float,
    accumulate: bool,
    **options: object,
) -> Pending:
    """What `collectives.reduce_scatter` would do if every rank had the same gradients."""
    ranks = group.size()
    summed = ranks * scale * partial.view(ranks, -1)[group.rank()]
    output.copy_(output + summed if accumulate else summed)
    return Pending()


@contextmanager
def no_wait_of_the_host() -> Iterator[None]:
    """An error wherever torch makes the host wait for the device; waiting for an event is no such place."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
