"""Weight gradients that a captured backward writes into the buffers that are reduced.

interface         when a backward is tried              when it is captured            when it is replayed
----------------  ------------------------------------  -----------------------------  ---------------------------------
weight_gradient   returns scratch memory; calls noted   returns the engine's buffer    called in order before the replay
main_grad         is scratch memory; flags noted        is the engine's buffer         flags set again after the replay

The engine is the runtime that a model's units share. The calls are of the function `weight_gradient`. The flags are the
attributes `grad_added_to_main_grad` of parameters. A backward is tried first, to find out which gradients it writes.

A graph fixes the addresses of the engine's buffers, and whether the backward overwrites a buffer or adds to it. The
first microbatch and later microbatches therefore have separate recordings.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.fsdp.gradients.direct import substituting, weight_gradient
from weft.graphs.capture import CaptureRefused
from weft.graphs.places import Ranges, local, range_of

_OTHERS = "a backward in it needs other weight gradients than before: leave its module out of weft.Graphs"
MOST = 8
"""The maximum number of recordings of one function, each for one set of buffers. With any other set, the function runs
eagerly."""
Target = tuple[Tensor, bool]
"""A buffer, and whether to add to it."""


class Writes:
    """The weight gradients that a backward writes into buffers instead of returning them. `asked`: the parameters for
    which the backward calls `weight_gradient`, in the order of the calls. `added`: the parameters to whose `main_grad`
    the backward adds."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.asked: list[nn.Parameter] = []
        self.added: list[Any] = []
        self._declared: list[Any] = [each for each in parameters if hasattr(each, "grad_added_to_main_grad")]

    def __bool__(self) -> bool:
        return bool(self.asked or self.added)

    @contextmanager
    def tried(self) -> Iterator[Ranges]:
        """Make a backward inside this context write to scratch memory, and note its writes in `asked` and `added`.
        Yields the scratch memory that stands in for each `main_grad`."""
        before = [(vars(each).get("main_grad"), each.grad_added_to_main_grad) for each in self._declared]
        scratch = [torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in self._declared]
        for each, place in zip(self._declared, scratch):
            each.main_grad, each.grad_added_to_main_grad = place, False
        try:
            with substituting(answer=self._note):
                yield [range_of(each, writable=True) for each in scratch]
            self.added = [each for each in self._declared if each.grad_added_to_main_grad]
        finally:
            for each, (place, flag) in zip(self._declared, before):
                each.main_grad, each.grad_added_to_main_grad = place, flag
                if place is None:
                    del each.main_grad

    def begin(self) -> None:
        """Forget the calls of an earlier run: a backend may run the backward several times."""
        self.asked.clear()

    def _note(self, parameter: nn.Parameter) -> Target:
        self.asked.append(parameter)
        return torch.empty_like(local(parameter), memory_format=torch.contiguous_format), False


def _nothing() -> None:
    """Do nothing at the end of a trial. A trial has no expected number of calls of `weight_gradient` to check."""


class Recorded(NamedTuple):
    """A recording, and the result of its function."""

    recording: Any
    result: Any


class Recordings:
    """The recordings of one function that may write weight gradients: one for each set of gradient buffers (`Targets`).

    `capture`: captures a function, given the memory to which it may write. `restored`: returns a context that restores
    the buffers of the modules (`Module.buffers()`) at its end. `count`: called with the reason each time `run` runs the
    function eagerly.
    """

    def __init__(
        self,
        capture: Callable[[Callable[[], Any], Ranges], tuple[Any, Any]],
        function: Callable[[], Any],
        parameters: Sequence[nn.Parameter],
        restored: Callable[[], AbstractContextManager],
        count: Callable[[str], None],
    ) -> None:
        self._capture, self._function = capture, function
        self._restored, self._count = restored, count
        self.writes = Writes(parameters)
        with self.writes.tried() as scratch:
            self.tried = self._record(self.writes.begin, _nothing, scratch)
        self._found: dict[tuple[Any, ...], Recorded] = {} if self.writes else {(): self.tried}

    def _record(self, begin: Callable[[], None], end: Callable[[], None], may_write: Ranges) -> Recorded:
        def whole() -> Any:
            begin()
            result = self._function()
            end()
            return result

        result, recording = self._capture(whole, may_write)
        return Recorded(recording, result)

    @property
    def nbytes(self) -> int:
        """The memory of all recordings in bytes, including the recording of the trial, which is kept."""
        others = self._found.values() if self.writes else ()
        return sum(each.recording.nbytes for each in (self.tried, *others))

    def run(self, *, poisoned: bool) -> Any:
        """Replay the recording that writes into the current gradient buffers. For new buffers, make a recording first.
        If none can be made, run the function eagerly. Return the function's result, which the next replay overwrites.
        `poisoned`: for tests, overwrite the memory of the results before the replay."""
        targets = Targets(self.writes)
        found = self._found.get(targets.key)
        because = f"a backward writes to more than {MOST} sets of buffers"
        try:
            if found is None and len(self._found) < MOST:
                with self._restored(), targets.restored(), substituting(answer=targets.answer):
                    found = self._found[targets.key] = self._record(targets.begin, targets.end, targets.ranges())
        except CaptureRefused as error:
            because = str(error)
        if found is None:
            self._count(because)
            targets.begin()
            with substituting(answer=targets.answer), torch.enable_grad():
                result = self._function()
            targets.end()
        else:
            if poisoned:
                found.recording.poison()
            found.recording.replay()
            result = found.result
        targets.written()
        return result


class Targets:
    """The gradient buffers into which one backward writes. `key`: their addresses, strides and dtypes, and whether the
    backward overwrites a buffer or adds to it. A recording can be replayed only for the key of its capture."""

    def __init__(self, writes: Writes) -> None:
        self._asked = list(writes.asked)
        self._answers = [weight_gradient(parameter) for parameter in writes.asked]
        self._added = writes.added
        self._next = 0
        buffers = self._buffers()
        self.key = (
            *((each.data_ptr(), each.stride(), each.dtype) for each in buffers),
            *(accumulate for _, accumulate in self._answers),
        )

    def _buffers(self) -> list[Tensor]:
        return [*(buffer for buffer, _ in self._answers), *(each.main_grad for each in self._added)]

    def ranges(self) -> Ranges:
        """Return the memory that the backward may write to."""
        return [range_of(each, writable=True) for each in self._buffers()]

    def begin(self) -> None:
        """Start a run of the backward: the next call of `answer` is the run's first."""
        self._next = 0

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the values of the gradient buffers at the end of this context. The backward may run any number of
        times inside."""
        buffers = self._buffers()
        with torch.no_grad():
            before = [each.clone() for each in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in zip(buffers, before):
                    buffer.copy_(values)

    def answer(self, parameter: nn.Parameter) -> Target:
        """Return the buffer for the next call of `weight_gradient` in the backward, and whether to add to it. Raises
        CaptureRefused if the trial of the backward made this call for a different `parameter`, or did not make it."""
        if self._next == len(self._asked) or self._asked[self._next] is not parameter:
            raise CaptureRefused(_OTHERS)
        self._next += 1
        return self._answers[self._next - 1]

    def end(self) -> None:
        """End a run of the backward. Raises CaptureRefused if this run called `weight_gradient` fewer times than the
        trial did."""
        if self._next != len(self._asked):
            raise CaptureRefused(_OTHERS)

    def written(self) -> None:
        """Set `grad_added_to_main_grad` of the parameters to whose `main_grad` the backward has added."""
        for each in self._added:
            each.grad_added_to_main_grad = True
