"""Memory that lives for a moment: gathered weights, partial gradients, what other ranks send.

A `Transient` is a flat tensor whose memory comes and goes while its storage stays the same object, so that views of it
stay valid across a gather, a free and the next gather: autograd saves such views. A `Pool` lends plain buffers and
takes them back for the next asker, so that a steady step allocates nothing for them, and counts the bytes of both.
"""

from collections import defaultdict

import torch


class Pool:
    """Lends flat buffers by size, and keeps count of live bytes by role."""

    def __init__(self) -> None:
        self.allocations = 0
        self.live: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)

    def take(self, role: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor with unspecified contents, to be handed back with `give`."""
        free = self._free[numel, dtype, device]
        if free:
            tensor = free.pop()
        else:
            tensor = torch.empty(numel, dtype=dtype, device=device)
            self.allocations += 1
        self.count(role, tensor.nbytes)
        return tensor

    def give(self, role: str, tensor: torch.Tensor) -> None:
        """Hand back a tensor from `take`; computation on the compute lane must be done with it or ordered before."""
        self._free[tensor.numel(), tensor.dtype, tensor.device].append(tensor)
        self.count(role, -tensor.nbytes)

    def count(self, role: str, nbytes: int) -> None:
        """Note that `nbytes` more (or, negative, fewer) are alive in `role`."""
        self.live[role] += nbytes
        self.peak[role] = max(self.peak[role], self.live[role])


class Transient:
    """A flat tensor with memory only between `allocate` and `free`, and one storage for life.

    torch checks the memory when a view is made: make them with `tensor` new, then call `settle`.
    """

    def __init__(self, role: str, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.role = role
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self.nbytes = self.tensor.nbytes

    def settle(self) -> None:
        """All views are made: give the memory back until the first `allocate`."""
        self.tensor.untyped_storage().resize_(0)

    def allocate(self, pool: Pool) -> None:
        """Give the tensor memory, with unspecified contents."""
        self.tensor.untyped_storage().resize_(self.nbytes)
        pool.allocations += 1
        pool.count(self.role, self.nbytes)

    def free(self, pool: Pool) -> None:
        """Take the memory away; views stay valid for the next `allocate`."""
        self.tensor.untyped_storage().resize_(0)
        pool.count(self.role, -self.nbytes)
