"""Quantized parameters that are frozen when they are sharded: between uses, only the payload is kept, without the main
weights (the sharded weights that the payload is made from).

    event                                      main weights
    -----------------------------------------  ------------------------------------------------------------------------
    the payload has been made from them        are freed, unless other code holds a tensor in their memory
    they are read or written: by an operator,  are restored: the payload's values, dequantized to the parameter's dtype
      `to_local()`, a state dict, a checkpoint
    a pass begins, nothing was written         are freed again; the payload is unchanged
    the first pass begins, some rank has       the payload is made from them on all ranks, and they are freed
      written, as loading does
    a later pass begins, some rank has         are restored and kept, on all ranks: small writes, such as a moving
      written or unfrozen a weight             average's, would be lost in the payload

A payload that is not written to never changes. Quantizing its values gives the same payload again, with few exceptions
for `nvfp4`. Therefore state dicts hold dequantized values, and are independent of the format.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.dtensor.deferred import arrive, defer
from weft.dtensor.uneven import UnevenDTensor
from weft.memory.buffer import FlatBuffer
from weft.quantize.payload import Narrow
from weft.weak import alive


class PayloadOnly(FlatBuffer):
    """Main weights that can be freed: when `local` is read, they are restored from the payload."""

    # A rank's messages to the others. WRITTEN: weights were written to. NEEDED: weights must be kept from now on.
    WRITTEN, NEEDED = 1, 2

    def __init__(
        self, main: FlatBuffer, model: FlatBuffer, payload: Narrow, parameters: Sequence[UnevenDTensor]
    ) -> None:
        """Replace `main`, whose views are `parameters`. `model`: the buffer of this rank's payload."""
        self._local = main.local
        self._is_here = True
        super().__init__(main.layout, main.mesh, main.placements, main.local)
        main.local = main.local.new_empty(0)
        self._own = model.part(main.placements)
        self._payload = payload
        # Weak references: parameters must not be kept alive. A parameter that outlives its model can still be read.
        self._parameters = [weakref.ref(each) for each in parameters]
        self._parts = [each._local_tensor for each in parameters]
        self.has_passed = False  # whether a pass has begun. Writes before the first pass are initial values.
        self._own_holders = self._holders()

    @property
    def local(self) -> torch.Tensor:  # type: ignore[override]
        """This rank's main weights. Reading this property restores them if they were freed."""
        self.bring()
        return self._local

    @local.setter
    def local(self, value: torch.Tensor) -> None:
        self._local = value

    @property
    def version(self) -> int:
        """The version counter of the main weights. Freeing and restoring do not change it."""
        return self._local._version

    @property
    def storage(self) -> torch.UntypedStorage:
        return self._local.untyped_storage()

    @property
    def is_unfrozen(self) -> bool:
        """Whether the user has unfrozen any of the parameters."""
        return any(parameter.requires_grad for parameter in alive(self._parameters))

    def quantize(self) -> None:
        """Make this rank's payload from the main weights."""
        with torch.no_grad():
            self._payload.fill(self._own.local, self.local)

    def let_go(self) -> None:
        """Free the main weights' memory, unless a parameter was unfrozen or other code holds a tensor in this memory.
        The payload must be up to date."""
        if not self._is_here or self.is_unfrozen or self._holders() > self._own_holders:
            return
        self._is_here = False
        if not self.storage.resizable():
            self._move()
        self.storage.resize_(0)
        for parameter in alive(self._parameters):
            defer(parameter, self.bring)

    def bring(self) -> None:
        """Restore the main weights from the payload, if they were freed."""
        if self._is_here:
            return
        self._is_here = True
        with self._unwritten():
            self.storage.resize_(self._local.nbytes)
            self._payload.restore(self._own.local, self._local.zero_())
        for parameter in alive(self._parameters):
            arrive(parameter)

    def _move(self) -> None:
        """Replace the storage by a new one, without copying the values. A storage from NumPy cannot be resized."""
        fresh = torch.UntypedStorage(self.storage.nbytes(), device=self._local.device)
        with self._unwritten():
            for each in (self._local, *self._parts):
                each.set_(fresh, each.storage_offset(), each.shape, each.stride())  # type: ignore[call-overload]

    @contextmanager
    def _unwritten(self) -> Iterator[None]:
        """Keep the version counter unchanged: writes inside this context do not count as writes of the user."""
        version = self.version
        with torch.no_grad():
            yield
        torch._C._autograd._unsafe_set_version_counter((self._local,), (version,))

    def _holders(self) -> int:
        """Count tensors in the main weights' memory, and Python references to the storage and this object's tensors."""
        storage = self.storage
        sharing = torch._C._storage_Use_Count(storage._cdata)
        return sharing + sum(map(sys.getrefcount, (storage, self._local, *self._parts)))


def payload_only_of(group: Any) -> PayloadOnly | None:
    """Return a `PayloadOnly` that replaces the main weights of `group`, a parameter group, if they are frozen, not
    offloaded, not empty, and have one quantized copy. Otherwise return None: the main weights are kept."""
    stays = group.trainable or group.offload is not None or not group.layout.data_numel
    if stays or not isinstance(group.payload, Narrow) or group.payload.copies > 1:
        return None
    sharded = [each.sharded for each in group.parameters]
    return PayloadOnly(group.main_weight, group.model_weight, group.payload, sharded)
