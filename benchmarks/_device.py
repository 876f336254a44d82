"""A device that this machine has not got: products take as long as at its rate, and the cores are free meanwhile.

    with SlowDevice(20e9):      # 20 GFLOP/s
        step()                  # its products are computed here, in far less time, and then waited for

Ranks that share a core take each other's time, and a pipeline that idles less gains nothing by it. Here each rank has a
device of its own, as on a cluster; its network and the hosts' work stay what they are.
"""

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten._grouped_mm: 0, aten.addmm: 1}
"""Operators, and where the first of their two factors stands."""


class SlowDevice(TorchDispatchMode):
    """Inside, a product of matrices lasts as long as on a device that makes `rate` operations a second."""

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
