"""The calls of one model that autograd's backward has reached and not left."""

from typing import NoReturn

import torch

from weft.fsdp.driver import BackwardCall, in_backward
from weft.fsdp.unit import Unit


class BackwardCalls:
    """`append`: the next call whose backward begins."""

    def __init__(self) -> None:
        self._calls: list[BackwardCall] = []
        self.append = self._calls.append
        self.makes_graph = False
        """Whether the backward is itself to be differentiated."""

    def open(self) -> None:
        """The backward begins."""
        self.makes_graph = in_backward() and torch.is_grad_enabled()

    def refuse_graph(self, unit: Unit) -> NoReturn:
        """Gradients of `unit` are to be differentiated, and are about to be reduced."""
        raise RuntimeError(
            f"backward(create_graph=True) through {unit}: gradients of parameters are reduced over the ranks and "
            "cannot be differentiated; call torch.autograd.grad with respect to inputs"
        )

    def end(self) -> None:
        """Autograd's backward is over, and with it the calls whose end has no hook."""
        unended = [call.unit for call in self._calls if call.begun]
        if self.makes_graph and unended:
            raise RuntimeError(
                f"create_graph=True: a gradient was taken inside {unended[0]}, and a backward through it could not "
                "know when it needs the weights: take gradients with respect to inputs of sharded modules"
            )
        for call in reversed(self._calls):
            if call.begun:
                call.end()
        self._calls.clear()

    def abandon(self) -> None:
        """The backward failed."""
        for call in self._calls:
            call.abandon()
        self._calls.clear()
