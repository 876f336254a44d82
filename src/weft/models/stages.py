"""Exchanges small values between the pipeline stages of a model, such as a dictionary of losses."""

from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from weft.comm.groups import exchange_objects
from weft.mesh import parts_of

Found = TypeVar("Found")


class Stages:
    """Exchanges values between the ranks of this rank's pipeline. Without a pipeline, nothing is exchanged."""

    def __init__(self, model: nn.Module) -> None:
        self._cut = parts_of(model)
        self._model: Any = model

    @property
    def have_first_rank(self) -> bool:
        """Whether global rank 0 is in this rank's pipeline."""
        if self._cut is None or self._cut.group is None:
            return dist.get_rank() == 0
        return dist.get_process_group_ranks(self._cut.group)[0] == 0

    def all_of(self, value: Found) -> list[Found]:
        """Return the values of all ranks of the pipeline, in rank order. Collective."""
        if self._cut is None or self._cut.group is None:
            return [value]
        return exchange_objects(value, self._cut.group, "what stages report")

    def merged(self, named: dict[str, Found]) -> dict[str, Found]:
        """Merge the dictionaries `named` of all ranks of the pipeline into one. If several ranks have an entry of the
        same name, the entry of the highest rank is kept. Collective."""
        return {name: value for stage in self.all_of(named) for name, value in stage.items()}

    def count_parameters(self) -> int:
        """Return the number of parameter elements of the whole model. A parameter that the first and the last stage
        share counts once. Collective."""
        copies = self._model.shared_ends if self._cut is not None and self._cut.has_copies else ()
        again = {id(parameter) for module in copies for parameter in module.parameters()}
        return sum(
            self.all_of(sum(each.numel() for each in self._model.parameters() if id(each) not in again)),
        )
