"""The named scalars that your loss function returns, as means over microbatches and ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.collectives import reduce_now
from weft.comm.groups import exchange_objects
from weft.train.errors import ConfigError
from weft.train.record.names import is_own

_MARK_BITS = 16
"""The number of bits of a mark, which is a hash value of names. Marks are small, so that the sum of their squares over
all ranks is exact in fp64."""


class OwnNumbers:
    """Sums, by name, the numbers that your loss function returns. `means` needs the same names on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._totals: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Add the numbers of one microbatch. Raises ConfigError for a reserved name or a value that is not a scalar."""
        for name, value in numbers.items():
            if not isinstance(name, str) or not is_own(name):
                raise ConfigError(
                    f"loss: uses the name {name!r} for a number, but that name is reserved; choose another"
                )
            scalar = _scalar(name, value, self._device)
            self._totals[name] = self._totals[name] + scalar if name in self._totals else scalar
            self._counts[name] = self._counts.get(name, 0) + 1

    def marks(self) -> list[float]:
        """Return three hash values of the names, each followed by its square. From their sums over all ranks, `means`
        finds whether all ranks have the same names."""
        digest = hashlib.sha256("\0".join(sorted(self._totals)).encode()).digest()
        width = _MARK_BITS // 8
        parts = [int.from_bytes(digest[start : start + width], "little") for start in range(0, 3 * width, width)]
        return [float(mark) for part in parts for mark in (part, part * part)]

    def means(self, marks: Sequence[float]) -> dict[str, float]:
        """Return, by name, the mean of each number over the microbatches of all ranks. Microbatches for which the loss
        did not return the number do not count. Collective.

        `marks`: the sums over ranks of `self.marks()`. Raises ConfigError on all ranks if the names differ between
        ranks.
        """
        ranks, names = dist.get_world_size(), sorted(self._totals)
        sums = [int(mark) for mark in marks]
        # A mark is the same on all ranks if and only if the mean of its squares is the square of its mean.
        if any(ranks * squares != total * total for total, squares in zip(sums[::2], sums[1::2])):
            raise _differ(names)
        if not names:
            return {}
        totals = torch.stack([self._totals[name] for name in names])
        shared = torch.cat([totals, totals.new_tensor([self._counts[name] for name in names])])
        reduce_now(shared, dist.ReduceOp.SUM, None, "numbers that the loss returns")
        values = shared.tolist()
        return {name: total / count for name, total, count in zip(names, values, values[len(names) :])}


def _scalar(name: str, value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, Real):
        return torch.as_tensor(float(value), dtype=torch.float64, device=device)
    if not isinstance(value, torch.Tensor) or value.dim() or value.is_complex():
        kind = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ConfigError(f"loss: the number {name!r} is {kind}, not one real number; return its mean or sum")
    return value.detach().to(device=device, dtype=torch.float64)


def _differ(names: list[str]) -> ConfigError:
    of_all = exchange_objects(names, what="names of the numbers that the loss returns")
    other = next(rank for rank, found in enumerate(of_all) if found != of_all[0])
    first, second = (", ".join(found) or "none" for found in (of_all[0], of_all[other]))
    return ConfigError(
        f"loss: the names of its numbers differ between ranks ({first} on rank 0, {second} on rank {other}); return "
        f"the same names on every rank"
    )
