"""Work that the first rank does before all others."""

import json
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from weft.train.errors import ConfigError

Result = TypeVar("Result")
_POLL_S = 0.05


def first_rank_first(make: Callable[[], Result]) -> Result:
    """Call `make()` on the first rank and, when that call has ended, on all other ranks. Each rank returns the result
    of its own call.

    Collective, without a timeout. If `make()` raises ConfigError on the first rank, all ranks raise it. After any other
    error on the first rank, the other ranks still call `make()`.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return make()
    store = dist.distributed_c10d._get_default_store()
    key = f"weft/turn-{store.add(f'weft/turns-of-{rank}', 1)}"  # the same number on all ranks
    if rank == 0:
        said = ""
        try:
            return make()
        except ConfigError as error:
            said = str(error)
            raise
        finally:
            store.set(key, json.dumps(said))
    while not store.check([key]):
        time.sleep(_POLL_S)
    if said := json.loads(store.get(key)):
        raise ConfigError(said)
    return make()
