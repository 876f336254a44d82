"""Borders between pipeline stages, which pass values to the next stage and gradients back.

the stages are      the next stage gets         the gradients
------------------  --------------------------  ----------------------------------------------------
both on this rank   the same `Value` objects    are in these objects after the next stage's backward
on two ranks        values with copied data     are sent back and stored in the values of this rank
"""

from collections.abc import Hashable, Sequence

import torch

from weft.overlap.node import Value
from weft.pipeline.transport import BACKWARD, FORWARD, Channel, Transport


class Border:
    """The border between two pipeline stages. A rank that has neither of them does not use it.

    The values that cross the border are the activations, followed by the scalar losses of layers before the border.
    """

    def __init__(self, forward: Channel | None, backward: Channel | None) -> None:
        """`forward`, `backward`: the channels for values and for gradients. None if this rank has both stages."""
        self._forward = forward
        self._backward = backward
        self._here: dict[int, list[Value]] = {}

    @classmethod
    def of(cls, transport: Transport | None, border: int) -> "Border":
        """Return the border after stage number `border`. `transport`: None if one rank has all stages."""
        if transport is None:
            return cls(None, None)
        return cls(transport.channel(border, FORWARD), transport.channel(border, BACKWARD))

    # --- the stage before ---------------------------------------------------------------------------------------------

    def send(self, microbatch: int, key: Hashable, values: Sequence[Value]) -> None:
        """Send the values to the next stage. `key`: equal for microbatches whose values have the same shapes."""
        if self._forward is None:
            self._here[microbatch] = list(values)
            return
        hidden, *losses = (value.take() for value in values)
        self._forward.send(key, [hidden, *([torch.stack(losses)] if losses else [])])
        if self._backward is not None and torch.is_grad_enabled():
            self._backward.learn(key, self._forward)

    def gradients_come(self, values: Sequence[Value]) -> None:
        """Receive the gradients of the sent `values` and store them in `values`. If both stages are on this rank, the
        gradients are already there."""
        if self._backward is None:
            return
        hidden, *losses = self._backward.take()
        gradients = [hidden, *(losses[0].unbind() if losses else ())]
        for value, gradient in zip(values, gradients):
            if value.needs_grad:
                value.gradient = gradient

    # --- the next stage -----------------------------------------------------------------------------------------------

    def receive(self, microbatch: int) -> list[Value]:
        """Return the values from the previous stage."""
        if self._forward is None:
            return self._here.pop(microbatch)
        hidden, *losses = self._forward.take()
        tensors = [hidden, *(losses[0].unbind() if losses else ())]
        return [Value(tensor, needs_grad=torch.is_grad_enabled()) for tensor in tensors]

    def gradients_leave(self, key: Hashable, values: Sequence[Value]) -> None:
        """Send the gradients of the received `values` back. `key`: as in `send`."""
        if self._forward is None or self._backward is None:
            return
        self._backward.learn(key, self._forward)
        hidden, *losses = (value.take_gradient() for value in values)
        self._backward.send(key, [hidden, *([torch.stack(losses)] if losses else [])])
