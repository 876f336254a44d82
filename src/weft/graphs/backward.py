"""The backward of a captured function, with a recording for each form of its outputs' gradients.

form    which outputs have a gradient, and with which strides. An eager backward skips an operator if only
        outputs without a gradient need it. With other strides, kernels add in another order.
use     an edge of the autograd graph that leads to a leaf. An eager backward adds the gradients of a leaf's uses one by
        one, later modules first and earlier ones last. Therefore a replay returns them one by one.

A form that first appears in a replay is recorded then. A form that cannot be recorded is differentiated eagerly.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.graphs.capture import CaptureRefused, Recording
from weft.graphs.places import Ranges, range_of, touches, versions_set
from weft.graphs.statics import Sample, Static, copied
from weft.graphs.writes import MOST, Recordings

Capture = Callable[[Callable[[], Any], Ranges], tuple[Any, Recording]]
Samples = Sequence[Sample | None]


class Uses:
    """The uses of `leaves`: the edges to them in the autograd graph of `ends`. They are sorted by leaf and, for each
    leaf, in the order in which a backward reaches them. `of`: for each use, the index of its leaf in `leaves`."""

    def __init__(self, ends: Sequence[GradientEdge], leaves: Sequence[Tensor]) -> None:
        self._ends = ends
        edges = [get_gradient_edge(each) for each in leaves]
        number = {edge.node: leaf for leaf, edge in enumerate(edges)}
        found: list[list[tuple[int, int, Any]]] = [[] for _ in leaves]
        ahead, seen = [each.node for each in ends], set()
        while ahead:
            node = ahead.pop()
            if node in seen:
                continue
            seen.add(node)
            for index, (following, _) in enumerate(node.next_functions):
                if following in number:
                    found[number[following]].append((-node._sequence_nr(), index, node))  # later nodes come first
                elif following is not None:
                    ahead.append(following)
        self.of = [leaf for leaf, uses in enumerate(found) for _ in uses]
        self._wanted = [edge for edge, uses in zip(edges, found) if uses]
        self._brought: list[Tensor | None] = []
        taken: dict[Any, dict[int, int]] = {}
        for uses in found:
            for _, index, node in sorted(uses, key=lambda use: use[:2]) if len(uses) > 1 else ():
                taken.setdefault(node, {})[index] = len(self._brought)
                self._brought.append(None)
        for node, places in taken.items():
            node.register_hook(partial(_take, self._brought, places))
        self._counts = [len(uses) for uses in found if uses]

    def gradients(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the gradient of each use. `given`: each end's gradient (None: it has none). The graph is retained."""
        there = [(end, gradient) for end, gradient in zip(self._ends, given) if gradient is not None]
        ends, heads = [end for end, _ in there], [gradient for _, gradient in there]
        try:
            found = torch.autograd.grad(ends, self._wanted, heads, retain_graph=True, allow_unused=True)
            brought = iter(list(self._brought))
        finally:
            self._brought[:] = [None] * len(self._brought)
        made: list[Tensor | None] = []
        for count, gradient in zip(self._counts, found):
            made += [gradient] if count == 1 else [next(brought) for _ in range(count)]
        return made


def _take(brought: list[Tensor | None], places: dict[int, int], gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
    """The hook of an autograd node: store the gradients of some of its edges in `brought`, and do not pass them on.
    `places`: maps the index of each of these gradients in `gradients` to its index in `brought`."""
    for index, place in places.items():
        brought[place] = gradients[index]
    return tuple(None if index in places else each for index, each in enumerate(gradients))


class Form:
    """The recordings of one form (see the top of the file). `statics`: the tensors into which the outputs' gradients
    are copied (None: no gradient). `backward`: the recordings of the backward. `weights`: recordings of delayed weight
    gradients, if any. `kept`: for each use, whether its gradient must stay valid after the next replay."""

    def __init__(
        self, statics: Sequence[Static | None], backward: Recordings, weights: Recordings | None, kept: Sequence[bool]
    ) -> None:
        self.statics, self.backward, self.weights = statics, backward, weights
        # Also copy a gradient that shares memory with another one, or whose memory this recording did not allocate:
        # the memory then belongs to an output's gradient or to the forward.
        made, found = backward.tried.recording.memory(), backward.tried.result
        ranges = [(0, 0, False) if each is None else range_of(each) for each in found]
        self._copied = [
            keep or not touches(each, made) or touches(each, [*ranges[:number], *ranges[number + 1 :]])
            for number, (keep, each) in enumerate(zip(kept, ranges))
        ]

    def handed(self, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the results `found` of a replay for the caller: as copies where `_copied` is true, else as views."""
        return [
            None if each is None else copied(each) if copies else each.detach()
            for each, copies in zip(found, self._copied)
        ]

    @property
    def nbytes(self) -> int:
        """The total memory in bytes."""
        statics = sum(each.tensor.untyped_storage().nbytes() for each in self.statics if each is not None)
        return statics + self.backward.nbytes + (0 if self.weights is None else self.weights.nbytes)

    @property
    def reads(self) -> Ranges:
        """The memory that the recordings read but do not allocate."""
        weights = [] if self.weights is None else self.weights.tried.recording.reads
        return [*self.backward.tried.recording.reads, *weights]


class Backward:
    """The backward of a captured function, with one `Form` for each combination of layouts of its outputs' gradients.

    `capture`: captures a function, given memory that the function may use. `uses`: the uses of its leaves. `saved`: the
    tensors that autograd may have saved. `trained`: the parameters that train. `restored` and `count`: see
    `Recordings`. `delays`: the function mode that delays weight gradients, if any. `kept`: see `Form`.
    """

    def __init__(
        self,
        capture: Capture,
        uses: Uses,
        saved: Sequence[Tensor],
        trained: Sequence[nn.Parameter],
        restored: Callable[[], AbstractContextManager],
        count: Callable[[str], None],
        delays: Any,
        kept: Sequence[bool],
    ) -> None:
        self._capture, self._uses, self._delays, self._kept = capture, uses, delays, kept
        self._saved, self._versions = saved, [each._version for each in saved]
        self._trained, self._restored, self._count = trained, restored, count
        self._forms: dict[Any, Form | str] = {}

    def record(self, samples: Samples) -> Form:
        """Record the form of gradients with the layouts `samples` (None: no gradient). Raises CaptureRefused if this
        fails."""
        statics = [None if each is None else Static(each) for each in samples]
        given = [None if each is None else each.tensor for each in statics]
        of_statics = [range_of(each) for each in given if each is not None]
        recordings = partial(Recordings, lambda function, more: self._capture(function, [*of_statics, *more]))
        backward = recordings(partial(self._differentiate, given), self._trained, self._restored, self._count)
        for each in backward.tried.result:
            if each is not None:
                copied(each)  # raises CaptureRefused if it cannot be copied
        weights = None
        if self._delays is not None and self._delays.queued:
            if backward.writes:
                raise CaptureRefused("some of its weight gradients are delayed, and it writes others itself")
            of_statics += backward.tried.recording.memory()
            weights = recordings(self._delays.repeatable(), [], self._restored, self._count)
        return Form(statics, backward, weights, self._kept)

    def begin(self, samples: Samples, full: Sequence[Sample]) -> Ranges | None:
        """Record the form of `samples`, unless all are None. Raises CaptureRefused if this form cannot be recorded.

        Return the memory that a backward of any form may read. No form reads more than that of `full` (samples for all
        outputs). Return None if the form of `full` cannot be recorded.
        """
        first = None
        if any(samples):
            first = self._forms[tuple(each and each.stride for each in samples)] = self.record(samples)
        if first is not None and all(samples):
            return first.reads
        try:
            return self.record(full).reads
        except CaptureRefused:
            return None

    @property
    def nbytes(self) -> int:
        """The memory of all forms in bytes."""
        return sum(each.nbytes for each in self._forms.values() if isinstance(each, Form))

    @property
    def statics(self) -> Iterator[Tensor]:
        """The static tensors into which gradients are copied."""
        forms = (each for each in self._forms.values() if isinstance(each, Form))
        return (static.tensor for form in forms for static in form.statics if static is not None)

    def run(
        self, gradients: Sequence[Tensor | None], *, poisoned: bool
    ) -> tuple[Sequence[Tensor | None], Callable[[], None] | None]:
        """Replay the form of `gradients`, or differentiate eagerly if it cannot be recorded. Return a gradient for each
        use, and a function that computes the delayed gradients (None: no gradients are delayed).

        The next backward may overwrite gradients that are not `kept`. `poisoned`: see `Recordings.run`.
        """
        key = tuple([None if each is None else each.stride() for each in gradients])
        form = self._forms.get(key)
        if form is None:
            form = self._new(key, gradients)
        if isinstance(form, str):
            self._count(form)
            with torch.enable_grad():
                found = self._differentiate(gradients)
            made = [None if each is None else copied(each) for each in found]
            return made, None if self._delays is None else self._delays.repeatable()
        for static, gradient in zip(form.statics, gradients):
            if static is not None:
                static.fill(gradient)  # type: ignore[arg-type]
        found = form.handed(form.backward.run(poisoned=poisoned))
        return found, None if form.weights is None else partial(form.weights.run, poisoned=poisoned)

    def _new(self, key: Any, gradients: Sequence[Tensor | None]) -> Form | str:
        if len(self._forms) == MOST:
            return f"the gradients of its outputs have more than {MOST} different layouts"
        form: Form | str
        try:
            with torch.enable_grad(), self._restored():
                form = self.record([None if each is None else Sample.of(each) for each in gradients])
        except CaptureRefused as error:
            form = str(error)
        self._forms[key] = form
        return form

    def _differentiate(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self._delays is not None:
            self._delays.forget()
        with versions_set(self._saved, self._versions), self._delays or nullcontext():
            return self._uses.gradients(given)
