"""The process of one rank: random seeds, memory, output and exit."""

import os
import random
import resource
import sys
from collections.abc import Callable

import numpy
import torch

from weft.train.run.failures import FAILURE


def seed_all(seed: int, rank: int) -> None:
    """Seed the random generators of Python, NumPy and PyTorch from `seed` and `rank`. Each rank has its own seed."""
    seed_alike((seed + 1) * 1_000_003 + rank)


def seed_alike(seed: int) -> None:
    """Seed the random generators of Python, NumPy and PyTorch from `seed`, the same on every rank."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def memory_in_use(device: torch.device) -> float:
    """Return the peak memory of this rank so far, in bytes. On a GPU, this is memory that PyTorch has allocated; on the
    CPU, it is the resident memory of the process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def end_with(line: str) -> None:
    """Print `line` and end this process, from any thread."""
    print(f"weft train: {line}", file=sys.stderr, flush=True)
    os._exit(FAILURE)  # another thread cannot end a hanging main thread in any other way


def print_on(rank: int) -> Callable[[str], None]:
    """Return a function that prints a line if `rank` is 0. On other ranks, the function does nothing."""
    return (lambda line: print(line, flush=True)) if rank == 0 else (lambda line: None)
