"""Tracks the load of experts during a run, and changes the router biases so that the load becomes balanced."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.models.stages import Stages
from weft.moe import exchanged_rows, expert_layers, load_statistics, router_losses


class ExpertBalance:
    """Counts how often each expert is chosen, summed over the ranks of `mesh`, and balances these loads with biases.

    `bias_rate`: in routers with `expert_bias`, each step adds this number to the bias of experts with less than the
    mean load, and subtracts it from the bias of experts with more.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, bias_rate: float) -> None:
        self._model, self._mesh, self._bias_rate = model, mesh, bias_rate
        self._routers = {name: layer.router for name, layer in expert_layers(model).items()}
        self._has_bias = any(router.expert_bias is not None for router in self._routers.values())
        has_losses = any(router.aux_loss_coef or router.z_loss_coef for router in self._routers.values())
        self._stages = Stages(model)
        self.has_losses = any(self._stages.all_of(has_losses))
        self.exchanged: dict[str, list[int]] = {}
        """For the last logged step, by layer name: [assignments to experts on other ranks, rows sent for them], summed
        over all ranks."""

    def take_losses(self, zero: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of this rank's routers over all microbatches since the last call.

        `zero`: a scalar 0, to which the losses are added.
        """
        return sum(router_losses(self._model).values(), zero)

    def after_step(self, *, show: bool, skipped: bool) -> dict[str, list[int]]:
        """Change the biases according to the loads of the step, unless the step is `skipped`. Then reset the loads.
        Collective.

        With `show`, return, by layer name, how often each expert was chosen in the step, summed over all ranks.
        Otherwise return an empty dictionary.
        """
        moves = self._has_bias and not skipped
        if not (show or moves):
            load_statistics(self._model)  # the next step counts from zero
            exchanged_rows(self._model)
            return {}
        exchanged = exchanged_rows(self._model, group=self._mesh if show else None)
        if show:
            self.exchanged = self._stages.merged({name: rows.tolist() for name, rows in exchanged.items()})
        loads = load_statistics(self._model, group=self._mesh)
        for name, router in self._routers.items():
            if moves and router.expert_bias is not None:
                router.update_bias(loads[name], self._bias_rate)
        return self._stages.merged({name: load.tolist() for name, load in loads.items()}) if show else {}
