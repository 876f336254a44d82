"""Measures the activation memory of a step, on any device."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Activations(TorchDispatchMode):
    """Measures the peak of the memory that operations allocate inside the `with` block and free before the block ends.

    This memory holds activations, their gradients and temporary tensors. Gradients of weights do not count, because
    they still exist at the end. Gathered weights do not count, because their buffers exist before the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The peak in bytes; known after the block."""
        self._changes: list[tuple[int, int]] = []
        """(number of the storage, bytes allocated (positive) or freed (negative)), in order of time."""
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
    """Return the storages of the plain, dense tensors in `values`."""
    tensors = (each for each in tree_leaves(values) if type(each) in (torch.Tensor, torch.nn.Parameter))
    return [each.untyped_storage() for each in tensors if each.layout is torch.strided]
