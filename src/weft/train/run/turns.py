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
    """Call `make()` on the first rank and, when it has returned, on all others. Return the result of each rank's own
    call. There is no timeout.

    Collective. If the first rank raises ConfigError, all ranks raise it.
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
