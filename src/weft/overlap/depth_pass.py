"""One prediction depth in one microbatch: its nodes around its layers.

    hidden -> [enter] -> x -> layer -> ... -> layer -> [leave] -> hidden -> the next depth, or the head
                 +-> previous, for the head

What the head and a depth both read leaves `enter` a second time: its gradients meet there, and what stands before is
walked once.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from weft.fsdp.precision import MixedPrecisionPolicy
from weft.overlap.microbatch import Microbatch
from weft.overlap.node import ComputeNode, Value
from weft.overlap.order import FORWARD
from weft.overlap.wgrad import DelayedWeights


class DepthPass:
    """The steps "enter" and "leave" of depth `number` of `model`, each called once in each direction.

    `policy`: the casts at the depth's border. `owner`: check the nodes against its parameters.
    """

    previous: Value
    """What the head scores besides, there after the forward of "enter"."""

    def __init__(
        self,
        name: str,
        model: Any,
        number: int,
        microbatch: Microbatch,
        policy: MixedPrecisionPolicy,
        *,
        delay_wgrad: bool,
        owner: nn.Module | None,
    ) -> None:
        self._model = model
        self._number = number
        self._microbatch = microbatch
        self._policy = policy
        self._owner = owner
        self._delayed = DelayedWeights() if delay_wgrad else None
        self._enter = ComputeNode(f"{name}.enter", self._delayed)
        self._leave = ComputeNode(f"{name}.leave")

    def run(self, direction: str, slot: str, hidden: Value) -> Value:
        """Run one step. Returns what follows from `hidden` in a forward."""
        if direction == FORWARD:
            return self._entered(hidden) if slot == "enter" else self._left(hidden)
        if slot == "leave":
            self._leave.backward()
        elif slot == "enter":
            self._enter.backward()
        else:
            assert self._delayed is not None
            self._delayed.run()
        return hidden

    def _entered(self, hidden: Value) -> Value:
        def function(hidden: Tensor) -> Sequence[Tensor]:
            previous = hidden if self._number else self._model.final_norm(hidden)
            beside = self._microbatch.given(self._model.following)
            following = self._model.following(self._number, self._microbatch.tokens, **beside)
            depth = self._model.depths[self._number]
            return [self._policy.cast_output(depth.enter(*self._policy.cast_inputs((following, previous)))), previous]

        entered, self.previous = self._enter.forward(function, [hidden], self._owner)
        return entered

    def _left(self, hidden: Value) -> Value:
        def function(hidden: Tensor) -> Sequence[Tensor]:
            return [self._policy.cast_output(self._model.depths[self._number].leave(hidden))]

        (left,) = self._leave.forward(function, [hidden], self._owner)
        return left
