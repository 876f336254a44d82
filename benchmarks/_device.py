"""Simulates a slower device: matrix products take as long as on that device, and leave the cores free.

    with SlowDevice(20e9):      # 20 GFLOP/s
        step()                  # computes its products in far less time, then sleeps for the rest

If ranks share cores, idle time of one rank speeds up the others, so a schedule with less idle time is not faster. With
a simulated device for each rank, such a schedule is faster, as on a cluster. Network transfers and host work take their
real time.
"""

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten._grouped_mm: 0, aten.addmm: 1}
"""Matrix products. For each, the index of the first of its two factors among the arguments."""


class SlowDevice(TorchDispatchMode):
    """Makes each matrix product take as long as on a device that executes `rate` operations per second."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        place = PRODUCTS.get(function.overloadpacket)
        if place is not None:
            one, other = args[place : place + 2]
            end = begin + 2 * one.numel() * other.shape[-1] / self._rate
            time.sleep(max(end - time.perf_counter(), 0))
        return result
