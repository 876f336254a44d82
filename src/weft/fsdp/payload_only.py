"""Main weights of quantized parameters that are frozen when they are sharded: at rest the payload alone is kept.

    event                                      main weights
    -----------------------------------------  ------------------------------------------------------------------------
    the payload has been made from them        go, unless code elsewhere has a tensor in their memory
    they are read or written: by an operator,  come: the payload's values, dequantized to the parameter's dtype
      `to_local()`, a state dict, a checkpoint
    a pass begins, nothing was written         go again; the payload is as it was
    the first pass begins, some rank has       the payload is made from them on all ranks, and they go
      written, as loading does
    a later pass begins, some rank has         come and stay, on all ranks: small writes, such as those of a moving
      written or unfrozen one                  average, would be lost in the payload

So a payload that nothing writes to never changes. Quantizing its values gives the same values again, with few
exceptions for `nvfp4`, so state dicts hold values and need not know the format.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.dtensor.deferred import arrive, defer
from weft.dtensor.uneven import UnevenDTensor
from weft.fsdp.narrow import Narrow
from weft.memory.buffer import FlatBuffer


class PayloadOnly(FlatBuffer):
    """Main weights that come from `payload` when `local` is asked for."""

    WRITTEN, NEEDED = 1, 2
    """What one rank tells the others of them."""

    def __init__(
        self, main: FlatBuffer, model: FlatBuffer, payload: Narrow, parameters: Sequence[UnevenDTensor]
    ) -> None:
        """Take the place of `main`, whose views `parameters` are. `model`: of all bytes that lie here."""
        self._local = main.local
        self._is_here = True
        super().__init__(main.layout, main.mesh, main.placements, main.local)
        main.local = main.local.new_empty(0)
        self._own = model.part(main.placements)
        self._payload = payload
        # Weak: a parameter that is kept when its model has gone finds its values, and they keep no parameter.
        self._parameters = [weakref.ref(each) for each in parameters]
        self._parts = [each._local_tensor for each in parameters]
        self.has_passed = False
        """Whether a pass has begun, which finds first values."""
        self._own_holders = self._holders()

    @property
    def local(self) -> torch.Tensor:  # type: ignore[override]
        """What lies here, which comes if it has gone."""
        self.bring()
        return self._local

    @local.setter
    def local(self, value: torch.Tensor) -> None:
        self._local = value

    @property
    def version(self) -> int:
        """See `FlatBuffer.version`. Coming and going are no writes."""
        return self._local._version

    @property
    def storage(self) -> torch.UntypedStorage:
        """See `FlatBuffer.storage`; empty if they have gone."""
        return self._local.untyped_storage()

    @property
    def is_unfrozen(self) -> bool:
        """Whether a user has unfrozen one of them."""
        return any((parameter := ref()) is not None and parameter.requires_grad for ref in self._parameters)

    def quantize(self) -> None:
        """Make the bytes that lie here from them."""
        with torch.no_grad():
            self._payload.fill(self._own.local, self.local)

    def let_go(self) -> None:
        """The payload is made from them: let their memory go, if no other code has a tensor in it."""
        if not self._is_here or self.is_unfrozen or self._holders() > self._own_holders:
            return
        self._is_here = False
        if not self.storage.resizable():
            self._move()
        self.storage.resize_(0)
        for ref in self._parameters:
            if (parameter := ref()) is not None:
                defer(parameter, self.bring)

    def bring(self) -> None:
        """Make them from the payload, if they have gone."""
        if self._is_here:
            return
        self._is_here = True
        with self._unwritten():
            self.storage.resize_(self._local.nbytes)
            self._payload.restore(self._own.local, self._local.zero_())
        for ref in self._parameters:
            if (parameter := ref()) is not None:
                arrive(parameter)

    def _move(self) -> None:
        """Take new memory, without values: memory that was once an array of numpy keeps its size for ever."""
        fresh = torch.UntypedStorage(self.storage.nbytes(), device=self._local.device)
        with self._unwritten():
            for each in (self._local, *self._parts):
                each.set_(fresh, each.storage_offset(), each.shape, each.stride())  # type: ignore[call-overload]

    @contextmanager
    def _unwritten(self) -> Iterator[None]:
        """Within it, writes do not count as such."""
        version = self.version
        with torch.no_grad():
            yield
        torch._C._autograd._unsafe_set_version_counter((self._local,), (version,))

    def _holders(self) -> int:
        """How many references there are to their memory: tensors that share it, and references to it and to those of
        them that are here."""
        storage = self.storage
        sharing = torch._C._storage_Use_Count(storage._cdata)
        return sharing + sum(map(sys.getrefcount, (storage, self._local, *self._parts)))


def payload_only_of(group: Any) -> PayloadOnly | None:
    """What takes the place of the main weights of `group`, if they need not stay: frozen ones, on the device, for which
    there is one payload."""
    stays = group.trainable or group.offload is not None or not group.layout.data_numel
    if stays or not isinstance(group.payload, Narrow) or group.payload.copies > 1:
        return None
    sharded = [each.sharded for each in group.parameters]
    return PayloadOnly(group.main_weight, group.model_weight, group.payload, sharded)
