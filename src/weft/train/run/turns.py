"""Work that one rank does for all ranks."""

import json
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from weft.train.errors import ConfigError

Result = TypeVar("Result")
_POLL_S = 0.05


def first_rank_first(make: Callable[[], Result]) -> Result:
    """`make()` of each rank, those of the others after the first one's, which may take as long as it wants.

    All ranks call this. A ConfigError of the first is one on all.
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
