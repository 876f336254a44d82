"""Quantized parameters that are frozen when they are sharded: between uses, only the payload (the quantized elements
and their scales) is kept. The main weights (the sharded weights from which the payload is made) are freed.

    event                                         what happens to the main weights
    --------------------------------------------  ---------------------------------------------------------------------
    the payload was made from the main weights    they are freed, unless other code holds a tensor in their memory
    main weights are read or written (by an       they are restored: the payload is dequantized to the dtype of the
      operator, `to_local()`, a state dict or a     parameter
      checkpoint)
    a pass begins, and no rank has written to     they are freed again; the payload does not change
      the main weights
    the first pass begins, and some rank has      the payload is made from them on all ranks, and they are freed
      written to them, for example to load them
    a later pass begins, and some rank has        they are restored and kept on all ranks, because the payload would
      written to them                               lose small writes, such as those of a moving average
    a pass begins, and some rank has unfrozen     they are restored and kept on all ranks
      a parameter

The payload changes only if the main weights are written. State dicts can hold dequantized values, and thus do not
depend on the format. Quantizing these values again gives the same payload, with few exceptions for `nvfp4` and fp16
parameters. With `pow2=True`, some blocks get half the scale and other codes, which stand for the same values.
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
    """Main weights that can be freed. Reading `local` restores them from the payload."""

    # A rank's messages to the other ranks. WRITTEN: the main weights were written to. NEEDED: the main weights must be
    # kept from now on.
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
        """Replace a storage that cannot be resized, such as one from NumPy, by a new one. Values are not copied."""
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
        """Count tensors in the main weights' memory, and Python references to the storage and this object's tensors. A
        higher count than in the constructor means that other code holds a tensor in this memory."""
        storage = self.storage
        sharing = torch._C._storage_Use_Count(storage._cdata)
        return sharing + sum(map(sys.getrefcount, (storage, self._local, *self._parts)))


def payload_only_of(group: Any) -> PayloadOnly | None:
    """Return a `PayloadOnly` that replaces the main weights of the parameter group `group`. Return None if they must be
    kept, for example because the group is trainable or offloaded."""
    stays = group.trainable or group.offload is not None or not group.layout.data_numel
    if stays or not isinstance(group.payload, Narrow) or group.payload.copies > 1:
        return None
    sharded = [each.sharded for each in group.parameters]
    return PayloadOnly(group.main_weight, group.model_weight, group.payload, sharded)
