"""Measures the memory that the activations of a step take, on any device.

an operation     memory that it allocates counts from here ...
                 ... until nothing refers to it any more
end of a step    memory that is still referred to (gradients, buffers) was no activation and did not count
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Activations(TorchDispatchMode):
    """Counts the memory that operations make while it is entered and that goes again: activations, gradients of them
    and what lives for an operation. Gathered weights are none of it: they lie in buffers that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The most bytes at once; known after leaving."""
        self._changes: list[tuple[int, int]] = []
        """(number of a storage, bytes that it adds or frees) in order."""
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._made = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        there = {id(storage) for storage in _storages((arguments, options))}
        for storage in _storages(result):
            if id(storage) not in there and storage not in self._known:
                self._note(storage)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        staying = set(self._known.values())
        live = 0
        for number, change in self._changes:
            live += change if number not in staying else 0
            self.peak = max(self.peak, live)
        self._changes = []

    def _note(self, storage: Any) -> None:
        number, size = self._made, storage.nbytes()
        self._made += 1
        self._known[storage] = number
        self._changes.append((number, size))
        weakref.finalize(storage, self._changes.append, (number, -size)).atexit = False


def _storages(values: Any) -> list[Any]:
    """Of the plain, dense tensors in `values`."""
    tensors = (each for each in tree_leaves(values) if type(each) in (torch.Tensor, torch.nn.Parameter))
    return [each.untyped_storage() for each in tensors if each.layout is torch.strided]
