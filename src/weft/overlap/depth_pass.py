"""The nodes around the layers of one depth of multi-token prediction, in one microbatch.

    hidden -> [enter] -> x -> layer -> ... -> layer -> [leave] -> hidden -> the next depth, or the head
                 +-> previous, for the head

`enter` also returns `previous`, the hidden states before the depth, which the head needs. The backward of `enter` sums
the gradients that reach the input through x and `previous`, so the earlier graph is traversed only once.
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
    """The steps "enter" and "leave" of depth `number` of `model`, in one microbatch. Each runs once forward and once
    backward.

    `policy`: the casts of the depth's inputs and outputs. `owner`: the module whose parameters the steps may use. A
    step raises UndeclaredTensor if it uses a differentiable tensor that is neither its input nor a parameter of
    `owner`. With `owner=None`, nothing is checked.
    """

    previous: Value
    """The hidden states before the depth, for the head. The forward of "enter" sets it."""

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
        """Run the step `slot`: "enter" or "leave". In backward, `slot` can also be "enter.weights". This step computes
        the weight gradients that the backward of "enter" has delayed.

        A forward step takes its input `hidden` and returns its output. A backward step returns `hidden` unchanged.
        """
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
