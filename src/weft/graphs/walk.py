"""Finds the Python state, other than tensors, that a captured function may reach through its modules and closure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import _lru_cache_wrapper, cached_property, partial
from itertools import chain, repeat
from operator import attrgetter, call, is_, itemgetter
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import Any
from weakref import ProxyTypes, ReferenceType

import torch
from torch import Tensor, nn

from weft.fsdp.gradients.direct import original_of
from weft.graphs.capture import CaptureRefused
from weft.graphs.places import HOOKS, has_hooks

MOST = 5000
"""The maximum number of values that are compared before each replay."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that every module has. Of these, children, hooks and the names of tensors are compared."""
_PLAIN = frozenset(
    {int, bool, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device}
    | {torch.layout, torch.memory_format}
)
_OPAQUE = (Tensor, ModuleType, GenericAlias, UnionType)
_REACHED = (partial, ReferenceType, _lru_cache_wrapper, cached_property)
"""Classes of the standard library whose instances may refer to objects of the user."""
_LIBRARIES = frozenset(
    {"torch", "weft", "triton", "functools", "logging", "typing", "abc", "_abc", "re", "dataclasses", "enum"}
    | {"contextlib", "datetime", "decimal", "fractions", "pathlib", "uuid", "operator", "_operator", "_thread"}
)
"""Libraries whose objects are assumed not to change."""
_METHODS = frozenset({FunctionType, classmethod, staticmethod, property, type(None)})
_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OF_CELL = attrgetter("cell_contents", "cell_contents")
UNSET = object()
"""Stands for the value of an attribute that is not set."""


class Walk:
    """The Python state that can be reached from `modules` and `function`. `tokens`: names and values, to be compared
    with another walk's. `kept`: the objects that can change, each with a copy of its contents."""

    def __init__(self, modules: Sequence[nn.Module], function: Any) -> None:
        # `same` compares these before each replay, without Python code for each value: the elements of containers
        # (`_views`); the attributes of objects, modules and classes that exist now (`_getters`, `_of_methods`); and the
        # numbers of elements and attributes (`_sized`).
        self._views: list[Iterable[Any]] = []
        self._values: list[Any] = []
        self._getters: list[Callable[[Any], tuple]] = []
        self._owners: list[Any] = []
        self._got: list[Any] = []
        self._of_methods: list[tuple[Callable[[Any], tuple], Any]] = []
        self._methods: list[tuple] = []
        self._sized: list[Any] = []
        self._lengths: list[int] = []
        self.tokens: list[tuple[str, Any]] = []
        self.kept: list[tuple[Any, Any]] = []
        self._inside = 0
        """The number of elements in tuples. These are compared only if a tuple has been replaced by another object."""
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._classes: set[type] = set()
        self._ahead: deque[tuple[str, Any]] = deque()
        for each in modules:
            self._numbers[id(each)] = len(self._numbers)
        try:
            for number, each in enumerate(modules):
                self._module(type(each).__name__, each, outermost=not number)
            self._note("forward", function)
            while self._ahead:
                self._reach(*self._ahead.popleft())
                self._check_size()
        except RecursionError:
            raise CaptureRefused("it may read state that cannot be compared: tuples are nested too deeply") from None

    def same(self) -> bool:
        """Return whether each recorded attribute, element and closure variable is still the same object. May raise
        KeyError, AttributeError or ValueError if one no longer exists."""
        return (
            [*map(len, self._sized)] == self._lengths
            and all(map(is_, chain.from_iterable(map(call, self._getters, self._owners)), self._got))
            and [get(owner) for get, owner in self._of_methods] == self._methods
            and all(map(is_, chain.from_iterable(self._views), self._values))
        )

    def _check_size(self) -> None:
        if len(self._values) + len(self._got) + self._inside > MOST:
            raise CaptureRefused(f"it may read more values than the {MOST} that are compared before each call")

    def _size(self, container: Any) -> None:
        self._sized.append(container)
        self._lengths.append(len(container))

    def _look(self, *views: Iterable[Any]) -> None:
        self._views += views
        self._values += chain.from_iterable(views)

    def _get(self, getter: Callable[..., Any], owner: Any, names: Sequence[str]) -> None:
        found = getter(*names, *names[:2])(owner) if names else ()  # two names or more, so that it returns a tuple
        methods = [name for name, value in zip(names, found) if type(value) in _METHODS]
        if methods:  # for these types == means identity, and one == of two lists is fast
            self._of_methods.append((getter(*methods, methods[0]), owner))
            self._methods.append(self._of_methods[-1][0](owner))
        others = [name for name, value in zip(names, found) if type(value) not in _METHODS]
        if others:
            self._look_at(getter(*others, others[0]), owner)

    def _look_at(self, getter: Callable[[Any], tuple], owner: Any) -> None:
        self._getters.append(getter)
        self._owners.append(owner)
        self._got += getter(owner)

    def _names(self, name: str, values: Mapping[str, Any], skip: frozenset[str] = frozenset()) -> None:
        """Record the named attributes of an object or module."""
        self._size(values)
        self._get(itemgetter, values, [key for key in values if key not in skip])
        for key, value in values.items():
            if key not in skip:
                self._note(f"{name}.{key}", value)
        self.kept.append((values, dict(values)))

    def _token(self, name: str, value: Any) -> Any:
        """Return the token that represents `value` in comparisons. Its contents are visited later."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, str(value) if kind is slice else value
        if isinstance(value, (float, complex)) and not hasattr(value, "__dict__"):
            return kind, repr(value)  # including NumPy's floats
        if isinstance(value, (tuple, frozenset)) and not hasattr(value, "__dict__"):
            self._inside += len(value)
            self._check_size()
            inside = [self._token(f"{name}[{place}]", each) for place, each in enumerate(value)]
            return kind, tuple(inside) if isinstance(value, tuple) else frozenset(inside)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not hasattr(value, "__setitem__"):
            return kind, value.tobytes()  # a number
        if kind in ProxyTypes:
            raise CaptureRefused(f"it may read state that cannot be compared: {name} is a {kind.__name__}")
        if _is_opaque(value):  # `nn.RNNBase` also has its weights in a list, which may hold their stand-ins
            return kind, id(original_of(value) if isinstance(value, nn.Parameter) else value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)  # so that its id stays valid
            self._ahead.append((name, value))
        return kind, self._numbers[id(value)]

    def _note(self, name: str, value: Any) -> None:
        self.tokens.append((name, self._token(name, value)))

    def _reach(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            if has_hooks(value):
                raise CaptureRefused("a module inside it has hooks, which a replay would not run")
            self._module(name, value, outermost=False)
            for key, child in value._modules.items():
                self._note(f"{name}.{key}", child)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, FunctionType):
            self._names(name, vars(value))
            self._look_at(_OF_FUNCTION, value)
            self.tokens.append((f"{name}.__code__", value.__code__))
            self._note(f"{name}.__defaults__", (value.__defaults__, value.__kwdefaults__))
            for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                self._cells(f"{name} ({variable})", cell)
        elif isinstance(value, (MethodType, BuiltinFunctionType)):
            self._note(f"{name}.__self__", value.__self__)
            self._note(f"{name}.__func__", value.__func__ if isinstance(value, MethodType) else value.__name__)
        elif isinstance(value, (classmethod, staticmethod, _lru_cache_wrapper)):
            self._note(f"{name}.__wrapped__", value.__wrapped__)
        elif isinstance(value, property):
            self._note(f"{name}.fget", value.fget)
        elif isinstance(value, ReferenceType):
            self._note(f"{name}()", value())
        elif isinstance(value, Enum):
            self._names(name, vars(value), frozenset({"__objclass__"}))
        elif isinstance(value, partial):
            self._note(f"{name}.func", (value.func, value.args, value.keywords))
            self._names(name, vars(value))
        else:
            self._object(name, value)

    def _object(self, name: str, value: Any) -> None:
        known = self._contents(name, value)
        kind = type(value)
        members = (
            key for each in kind.__mro__ for key, it in vars(each).items() if isinstance(it, MemberDescriptorType)
        )
        slots = [key for key in members if key not in ("__dict__", "__weakref__")]
        if not known and _hides(kind, len(slots)):
            raise CaptureRefused(f"it may read state that cannot be compared: {name} is a {kind.__name__}")
        if hasattr(value, "__dict__"):
            self._names(name, vars(value))
        if slots:
            there = [key for key in slots if hasattr(value, key)]
            self._look(Slots(value, [key for key in slots if key not in there]))
            self._get(attrgetter, value, there)
            for key in there:
                self._note(f"{name}.{key}", getattr(value, key))
            self.kept.append((Slots(value, slots), [*Slots(value, slots)]))
        self._class(kind)

    def _contents(self, name: str, value: Any) -> bool:
        """Visit the contents of a container. Return whether `value` is a container."""
        if isinstance(value, (dict, MappingProxyType)):
            self._dict(name, value)
        elif isinstance(value, (list, deque)):
            self._size(value)
            self._look(value)
            self.tokens.append((name, len(value)))
            for place, each in enumerate(value):
                self._note(f"{name}[{place}]", each)
            self.kept.append((value, list(value)))
        elif isinstance(value, (set, frozenset)):
            self._size(value)
            self._look(value)
            self.tokens.append((name, frozenset(self._token(f"{name}[...]", each) for each in value)))
            self.kept.append((value, set(value)))
        elif isinstance(value, tuple):
            for place, each in enumerate(value):
                self._note(f"{name}[{place}]", each)
        else:
            return False
        return True

    def _dict(self, name: str, values: Mapping[Any, Any]) -> None:
        self._size(values)
        self._look(values, values.values())
        for key, value in values.items():
            inside = f"{name}.{key}" if isinstance(key, str) else f"{name}[{type(key).__name__}]"
            self._note(inside, value)
            self._note(inside, key)
        self.kept.append((values, dict(values)))

    def _module(self, name: str, module: nn.Module, *, outermost: bool) -> None:
        self._class(type(module))
        self._names(name, vars(module), _OF_TORCH)
        hooks = () if outermost else HOOKS  # hooks of the outermost module run around a replay
        for kind in ("_modules", *hooks):
            children = vars(module)[kind]
            self._size(children)
            if children:
                self._look(children.values())
            self.tokens += ((f"{name}.{key}", id(child)) for key, child in children.items())
            self.kept.append((children, dict(children)))
        for kind in ("_parameters", "_buffers"):  # a replaced one has another address
            self._size(vars(module)[kind])
            self.tokens.append((f"{name}.{kind}", tuple(vars(module)[kind])))

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if each in self._classes or _of_library(each) or each.__module__ == "builtins":
                continue
            self._classes.add(each)
            values = vars(each)
            self._size(values)
            self._get(itemgetter, values, [*values])
            for key, value in values.items():
                name = f"{each.__name__}.{key}"
                if _is_plain(key, value):
                    self.tokens.append((name, id(value)))
                else:
                    self._note(name, value)
            self.kept.append((each, dict(values)))

    def _cells(self, name: str, cell: CellType) -> None:
        contents = Slots(cell, ["cell_contents"])
        self.kept.append((contents, [*contents]))
        try:
            self._note(name, cell.cell_contents)
            self._look_at(_OF_CELL, cell)
        except ValueError:  # empty
            self._look(contents)
            self.tokens.append((name, UNSET))


class Slots:
    """The values of the attributes `names` of `owner`. These attributes, such as slots, are not in its `__dict__`. The
    value of an attribute that is not set is `UNSET`."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self.owner, self.names = owner, names

    def __iter__(self) -> Iterator[Any]:
        try:
            return iter([*map(getattr, repeat(self.owner), self.names, repeat(UNSET))])
        except ValueError:  # the only attribute is the contents of an empty cell
            return iter([UNSET])


def _hides(kind: type, slots: int) -> bool:
    """Return whether instances of `kind` can have state outside of attributes, as instances of C types can.
    `slots`: the number of slots of `kind`."""
    words = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ != object.__basicsize__ + words * object.__basicsize__ // 2


def _is_plain(key: str, value: Any) -> bool:
    """Return whether the entry `key` of a class is Python's own, or a method without state."""
    kind = type(value)
    if kind is FunctionType:
        held = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return not any(held)
    if hasattr(kind, "__get__"):
        return kind.__module__ == "builtins" and kind not in _METHODS
    return key.startswith("__") and key.endswith("__")


def _is_opaque(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return _of_library(type(value)) and type(value).__module__.startswith("weft")
    if isinstance(value, (type, FunctionType)):
        return _of_library(value)
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
    if isinstance(value, _REACHED):
        return False
    return isinstance(value, _OPAQUE) or _of_library(type(value))


def _of_library(kind: Any) -> bool:
    return str(kind.__module__).partition(".")[0] in _LIBRARIES
