"""A method whose calls are replayed from graphs if possible: each call runs eagerly, is captured or is replayed.

call                                                  what happens
----------------------------------------------------  ------------------------------------------------------------
evaluation, recomputation, a dispatch mode, ...       eager, counted with the reason
new shapes, numbers, structure or dtypes              eager; the layouts of the outputs' gradients are noted
known shapes etc., and a steady memory plan (*)       eager, and also captured; replayed once the ranks have agreed
captured, same addresses, no forward in flight        a replay
captured, its last forward still waits for backward   eager; if a schedule drives the model, another capture
weights or buffers have other addresses               the capture is dropped, and replaced once the plan is steady
attributes of its modules have changed                the capture is dropped and replaced, up to `MOST_CHANGES` times

(*) The memory plan is the layout of the buffers for gathered weights. While the plan is steady, no buffer moves.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from weft.graphs.capture import CONSTANTS, Backend, CaptureRefused, delaying
from weft.graphs.captured import Captured
from weft.graphs.places import Places
from weft.graphs.statics import Sample

MOST_SIGNATURES = 4
"""The maximum number of signatures (combinations of shapes, dtypes and numbers) of one method that are captured. Each
capture takes memory."""
MOST_CHANGES = 4
"""If attributes that a method reads change more often than this, the method runs eagerly from then on, because they
may change in each call."""
_ONE = tree_flatten(((torch.empty(0),), {}))[1]
"""The structure of the arguments of a call with one positional tensor."""


class Owner(Protocol):
    """The interface of `GraphTable`, the object that all graphed calls of one model share."""

    backend: Backend

    def eager_because(self) -> str | None:
        """Return why nothing can be replayed now, or None if replays are possible."""
        ...

    def may_capture(self) -> bool:
        """Return whether the memory plan has been steady for long enough to capture calls."""
        ...

    @property
    def in_schedule(self) -> bool:
        """Whether several microbatches may be in flight."""
        ...


class Signature:
    """The captures of calls with the same key (`GraphedCall._key`: shapes, dtypes, numbers, ...). `gradients`: the
    layouts of the gradients that outputs of an eager call got, by the output's index. `changes`: how often these
    captures were dropped because attributes had changed."""

    def __init__(self) -> None:
        self.gradients: dict[int, Sample] = {}
        self.captured: list[Captured] = []
        self.changes = 0

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """When these outputs get gradients, record the gradients' layouts."""
        for number, output in enumerate(outputs):
            if output.requires_grad and not output.is_leaf:
                output.register_hook(self._remember(number))

    def _remember(self, number: int) -> Callable[[Tensor], None]:
        gradients = self.gradients

        def remember(gradient: Tensor) -> None:
            gradients[number] = Sample.of(gradient)

        return remember


class GraphedCall:
    """Replaces the method `name` of `module`, to replay its calls if possible. `scope`: the name under which the report
    counts the calls. `inside`: returns the modules that the method uses. `is_owned`: see `Places`."""

    def __init__(
        self,
        owner: Owner,
        module: nn.Module,
        name: str,
        scope: str,
        inside: Callable[[nn.Module], Sequence[nn.Module]],
        is_owned: Callable[[nn.Parameter], bool],
    ) -> None:
        self.scope = scope
        self.captures = self.replays = 0
        self.eager: Counter[str] = Counter()
        self.refused: str | None = None
        """The reason why the call is never captured, or None."""
        self.failed = False
        """Whether a capture has failed since the ranks last agreed on captures (`GraphTable.agree`)."""
        self._owner = weakref.ref(owner)
        self._module = weakref.ref(module)
        self._name = name
        before = vars(module).get(name)
        self._before: Callable[..., Any] | None = before._before if isinstance(before, GraphedCall) else before
        """The module's own attribute that this call replaces, or None if it replaces the class's method."""
        self._inside = inside
        self._is_owned = is_owned
        self._places: Places | None = None
        self._signatures: dict[Any, Signature] = {}
        vars(module)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if owner is None or torch.compiler.is_compiling():
            return self._run(*args, **kwargs)
        because = self.refused or owner.eager_because()
        if because is None:
            leaves, spec = _flat(args, kwargs)
            key = self._key(leaves, spec)
            if isinstance(key, str):
                because = key
            else:
                return self._keyed(owner, key, leaves, spec, args, kwargs)
        self.eager[because] += 1
        return self._run(*args, **kwargs)

    def _keyed(self, owner: Owner, key: Any, leaves: Sequence[Any], spec: TreeSpec, args: tuple, kwargs: dict) -> Any:
        places = self._found_places()
        addresses = places.addresses()
        key = key, addresses[1]
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) == MOST_SIGNATURES:
                self.eager[f"more than {MOST_SIGNATURES} different input signatures"] += 1
                return self._run(*args, **kwargs)
            signature = self._signatures[key] = Signature()
        busy = 0
        for captured in list(signature.captured):
            if captured.holder() is not None:
                busy += 1
            elif captured.addresses != addresses:
                self._drop_outdated(addresses)
            elif not captured.python.same():
                self._changed(signature, captured)
                return self(*args, **kwargs)  # a new capture will have the current attributes
            elif captured.ready:
                self.replays += 1
                return captured.run(leaves, copies=not owner.in_schedule, queue=delaying())
        result = self._run(*args, **kwargs)
        if self.refused is not None:
            because = self.refused
        elif busy and not owner.in_schedule:
            because = "its last forward waits for its backward"
        elif any(not each.ready for each in signature.captured):
            because = "captured in this pass"
        elif not signature.gradients:
            because = "new inputs"
            signature.watch([each for each in tree_flatten(result)[0] if isinstance(each, Tensor)])
        elif not owner.may_capture():
            because = "warming up"
        else:
            because = self._capture(owner, signature, leaves, spec, places)
        self.eager[because] += 1
        return result

    def _drop_outdated(self, addresses: tuple[Any, ...]) -> None:
        """Drop all captures, under every key, that were made with other addresses of parameters or buffers."""
        for each in self._signatures.values():
            each.captured = [it for it in each.captured if it.addresses[0] == addresses[0]]

    def _changed(self, signature: Signature, captured: Captured) -> None:
        """Drop the captures that were made with the old attributes."""
        # Counted per signature, because one change of an attribute outdates the captures of all signatures.
        signature.changes += 1
        if signature.changes > MOST_CHANGES:
            self.refuse(f"attributes of its modules change between calls ({captured.python.difference()})")
        else:
            signature.captured = []
            self._places = None

    def _capture(
        self, owner: Owner, signature: Signature, leaves: Sequence[Any], spec: TreeSpec, places: Places
    ) -> str:
        try:
            captured = Captured(
                owner.backend, self._function(), leaves, spec, places, signature.gradients, self._count, delaying()
            )
        except Exception as error:
            self.failed = True
            first = str(error).strip().partition("\n")[0]  # the other lines of CUDA's errors are advice
            self.refuse(str(error) if isinstance(error, CaptureRefused) else f"{type(error).__name__}: {first}")
            return str(self.refused)
        signature.captured.append(captured)
        self.captures += 1
        return "captured in this pass"

    def _count(self, because: str) -> None:
        self.eager[because] += 1

    def refuse(self, because: str) -> None:
        """Run all further calls eagerly."""
        self.refused = because
        self._signatures.clear()

    def enable(self) -> None:
        """Allow replays of the captures, after the ranks have agreed (`GraphTable.agree`)."""
        for signature in self._signatures.values():
            for captured in signature.captured:
                captured.ready = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the attribute that replaces this object in a copy of the module: the copy's method, without graphs."""
        if self._before is not None:
            return copy.deepcopy(self._before, memo)
        module = self._module()
        return MethodType(getattr(type(module), self._name), memo.get(id(module), module))

    def drop(self) -> None:
        """Drop all captures, and restore the module's method."""
        self._signatures.clear()
        if (module := self._module()) is not None and vars(module).get(self._name) is self:
            del vars(module)[self._name]
            if self._before is not None:
                vars(module)[self._name] = self._before

    @property
    def nbytes(self) -> int:
        """The memory of the captures in bytes."""
        return sum(each.nbytes for signature in self._signatures.values() for each in signature.captured)

    def _function(self) -> Callable[..., Any]:
        """Return the function that an eager call runs. It is not cached: a user may replace the class's method."""
        module = self._module()
        return self._before if self._before is not None else MethodType(getattr(type(module), self._name), module)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._function()(*args, **kwargs)

    def _found_places(self) -> Places:
        if self._places is None:
            module = self._module()
            self._places = Places([] if module is None else self._inside(module), self._is_owned)
        return self._places

    def _key(self, leaves: Sequence[Any], spec: TreeSpec) -> Any:
        """Return the key of a capture for this call, or a string with the reason why there can be none."""
        described: list[Any] = []
        seen: dict[int, int] = {}
        device = None
        for number, each in enumerate(leaves):
            if isinstance(each, Tensor):
                if type(each) is not Tensor and type(each) is not nn.Parameter:
                    return f"an input is a {type(each).__name__}"
                if each.layout != torch.strided:
                    return f"an input has the layout {each.layout}"
                device = each.device
                same = seen.setdefault(id(each), number)
                described.append((each.shape, each.stride(), each.dtype, device, each.requires_grad, same))
            elif isinstance(each, float):
                described.append((type(each), each.hex()))  # -0.0 is not 0.0, and NaN is NaN
            elif isinstance(each, CONSTANTS):
                described.append((type(each), each))
            else:
                return f"an input is a {type(each).__name__}"
        if device is None:
            return "no input is a tensor"
        if torch.is_autocast_enabled(device.type):
            # Autocast casts a weight only at its first use, and never in a later backward. A capture cannot know
            # whether it must contain the cast.
            return "autocast is active around it"
        module = self._module()
        return (*described, spec, module is not None and module.training, delaying() is not None)


def _flat(args: tuple, kwargs: dict) -> tuple[Sequence[Any], TreeSpec]:
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
        return args, _ONE
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, spec
