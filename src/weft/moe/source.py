"""Random initial weights that depend only on the seed and on the name of the weight."""

import hashlib

import torch
from torch import Tensor

INITIAL_STD = 0.02
"""The standard deviation of the initial weights of linear layers, routers and experts."""


class _Root:
    """A seed that is drawn from torch's global generator when the first weight needs it, and then kept."""

    def __init__(self) -> None:
        self.number: int | None = None

    def get(self) -> int:
        if self.number is None:
            self.number = int(torch.randint(2**63 - 1, (), device="cpu"))
        return self.number


class WeightSource:
    """A source of random numbers that depend only on the seed and on a weight's name.

    The seed is drawn from torch's global CPU generator (`torch.manual_seed`) when the first weight is filled, and then
    kept. With the same seed, a weight that is filled from `source / "decoder" / "0"` gets the same values on every
    rank, no matter what was filled before. Therefore a pipeline stage can fill only its own layers, a rank can fill
    only its own experts, and a model on the meta device can be materialized module by module.

    Values differ between device types, and may differ between dtypes.
    """

    def __init__(self) -> None:
        self.root = _Root()
        self.path = ""

    def __truediv__(self, name: str) -> "WeightSource":
        child = WeightSource()
        child.root = self.root
        child.path = f"{self.path}/{name}"
        return child

    @torch.no_grad()
    def normal_(self, tensor: Tensor, std: float) -> None:
        """Fill `tensor` from a normal distribution with mean 0 and standard deviation `std`. Does nothing on the meta
        device."""
        if not tensor.is_meta:
            tensor.normal_(0.0, std, generator=self._generator(tensor.device))

    @torch.no_grad()
    def uniform_(self, tensor: Tensor, low: float, high: float) -> None:
        """Fill `tensor` from the uniform distribution between `low` and `high`. Does nothing on the meta device."""
        if not tensor.is_meta:
            tensor.uniform_(low, high, generator=self._generator(tensor.device))

    def _generator(self, device: torch.device) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.root.get()}{self.path}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
