"""How weights travel: the one place that turns main weights into what ranks send, and what has come into full weights.

    payload    each rank sends, per element    beside the full weights meanwhile
    -------    -----------------------------   ------------------------------------------------------------------
    `Plain`    one of the compute dtype        this rank's part in the main dtype, where it is uploaded and then cast

Everything else moves bytes. A group gathers for a use (`ParameterGroup.gather`), makes model weights anew after a step
(`refresh`), sends its part of a gather that it does not need (`serve`) and travels with neighbours (`Bucket`); all
four ask the group's payload to `write` what leaves this rank, and to `open` what has come.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from weft.comm import collectives
from weft.fsdp.plan import GroupPlan
from weft.memory.pool import Pool, Transient


class Payload(Protocol):
    """What a format of travelling weights implements."""

    staging: Transient | None
    """Memory that is taken by `write` and given back by `open`."""

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool) -> Callable[[], Any] | None:
        """What makes `own`, the part that this rank sends, from `source`, on the lane; None: `source` can be sent."""
        ...

    def open(self) -> None:
        """What was sent has come: the full weights are those that the computation reads."""
        ...


class Plain:
    """Weights travel in the compute dtype, in which they are used."""

    def __init__(self, plan: GroupPlan, describe: Callable[[], str]) -> None:
        self._uploads = plan.offload is not None
        self.staging: Transient | None = None
        if self._uploads and plan.recipe.main != plan.recipe.compute:
            self.staging = Transient(plan.home_numel, plan.recipe.main, plan.device, describe=describe)

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool) -> Callable[[], Any] | None:
        """See `Payload.write`."""
        if source.data_ptr() == own.data_ptr() or (source.dtype == own.dtype and not self._uploads):
            return None
        staging = pool.take(self.staging) if self.staging is not None and source.dtype != own.dtype else None
        return functools.partial(collectives.move, own, source, staging)

    def open(self) -> None:
        """See `Payload.open`."""
        if self.staging is not None:
            self.staging.give()
