"""The calls of a model whose backward autograd has entered and not left."""

from typing import NoReturn

import torch

from weft.fsdp.driver import BackwardCall, in_backward
from weft.fsdp.unit import Unit


class BackwardCalls:
    """The calls in the current backward. `append` adds one when its backward begins."""

    def __init__(self) -> None:
        self._calls: list[BackwardCall] = []
        self.append = self._calls.append
        self.makes_graph = False
        """Whether the backward runs with `create_graph=True`."""

    def open(self) -> None:
        """Note, at the beginning of a backward, whether it creates a graph."""
        self.makes_graph = in_backward() and torch.is_grad_enabled()

    def refuse_graph(self, unit: Unit) -> NoReturn:
        """Raise RuntimeError, because gradients of `unit` cannot be reduced in a backward with `create_graph=True`."""
        raise RuntimeError(
            f"backward(create_graph=True) through {unit}: gradients of parameters are reduced over the ranks and "
            "cannot be differentiated; call torch.autograd.grad with respect to inputs"
        )

    def end(self) -> None:
        """End the calls that are still open when autograd's backward is over, because no hook has ended them."""
        unended = [call.unit for call in self._calls if call.begun]
        if self.makes_graph and unended:
            raise RuntimeError(
                f"create_graph=True: a gradient was taken inside {unended[0]}, and a backward through that gradient "
                f"could not tell when the unit needs its weights: take gradients with respect to inputs of sharded "
                f"modules"
            )
        for call in reversed(self._calls):
            if call.begun:
                call.end()
        self._calls.clear()

    def abandon(self) -> None:
        """Abandon all calls after a failed backward."""
        for call in self._calls:
            call.abandon()
        self._calls.clear()
