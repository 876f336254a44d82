"""Context parallelism: the rows of a batch are cut over the ranks of an axis, and layers exchange what crosses.

Each of the `cp` ranks has two of 2 cp equal slices of every row, the r-th and the (2 cp - 1 - r)-th, so that causal
attention is even work. With cp = 2:

    row        0 0 1 1 2 2 3 3        slices
    rank 0     0 0 3 3
    rank 1     1 1 2 2

    layer   what is gathered over cp                             bytes
    *       keys and values, or heads are exchanged              grow with the row
            of a window that a slice holds, those before slices  constant
    +       latents and rotated keys                             the same, and fewer
    M, G    the last inputs of the convolution, then of each     constant
            slice what it does to the state and what it adds

Gathering runs on the lane "context". What comes back in backward is summed over the ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import reduce_now
from weft.comm.groups import group_of
from weft.mesh import Meshes
from weft.models.documents import PADDING, Documents
from weft.models.gathering import gathered, start_exchanging, start_gathering
from weft.models.loss import IGNORED_LABEL


class Piece(NamedTuple):
    """Equal parts of documents in this rank's slices: `queries` [count, S] and the `keys` [count, T] that they may see,
    the last S of them their own, as places in the flattened slices and in the flattened rows of keys."""

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Slices:
    """The slices of this rank of a batch, in place of `Documents`.

    `whole`: the documents of the batch, whose rows are padded to a multiple of 2 `ranks`. `group`: the ranks that share
    the rows, of which this is number `rank`.
    """

    whole: Documents
    rank: int = field(compare=False)
    group: Any = field(repr=False, compare=False)
    _made: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    is_plain = False

    @property
    def ranks(self) -> int:
        """How many ranks share the rows."""
        return self.group.size()

    @property
    def width(self) -> int:
        """The length of a slice."""
        return self.whole.seq // (2 * self.ranks)

    @property
    def mine(self) -> tuple[int, int]:
        """Which slices this rank has."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def require(self, values: Tensor) -> None:
        """Raise `ValueError` unless `values` are the slices of this batch."""
        if values.shape != (self.whole.batch, 2 * self.width):
            raise ValueError(
                f"slices of {self.whole.batch} rows, 2 x {self.width} tokens each, beside a tensor of shape "
                f"{list(values.shape)}: make them with weft.models.context_part"
            )

    def cut(self, values: Tensor) -> Tensor:
        """[batch, seq, ...] -> this rank's slices, [batch, 2 width, ...]."""
        parts = values.split(self.width, dim=1)
        return torch.cat([parts[number] for number in self.mine], dim=1)

    # --- what layers ask of documents ---------------------------------------------------------------------------------

    def position_ids(self, device: torch.device) -> Tensor:
        """As `Documents.position_ids`, of the slices."""
        return self.kept(device, "position_ids", lambda: self.cut(self.whole.position_ids()))

    def reaches(self, device: torch.device) -> Tensor:
        """As `Documents.reaches`, of the slices."""
        return self.kept(device, "reaches", lambda: self.cut(self.whole.reaches()))

    def labels(self, labels: Tensor) -> Tensor:
        """What `context_part` has cut has its labels masked."""
        return labels

    def following(self, values: Tensor, places: int, filling: int) -> Tensor:
        """As `Documents.following`; the slices behind are gathered."""
        whole = self._joined(gathered(self.group, values)[0].unbind())
        return self.cut(self.whole.following(whole, places, filling))

    def kept(self, device: torch.device, name: str, make: Callable[[], Tensor]) -> Tensor:
        """As `Documents.kept`."""
        if (device, name) not in self._made:
            with torch.inference_mode(False):
                self._made[device, name] = make().to(device)
        return self._made[device, name]

    # --- attention ----------------------------------------------------------------------------------------------------

    def gathering(self, *parts: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to gather [batch, 2 width, ...] each; the result gives [batch, seq, ...] of the whole rows."""
        finish = start_gathering(self.group, *parts)
        return lambda: [self._joined(each.unbind()) for each in finish()]

    def exchanging(self, *parts: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to send the heads of [batch, 2 width, heads, C] each to the ranks, an equal part to each.

        The result gives this rank's heads at all positions of the rows, [batch, seq, heads / ranks, C].
        """
        by_rank = (torch.stack(part.chunk(self.ranks, dim=2)) for part in parts)
        finish = start_exchanging(self.group, *by_rank)
        return lambda: [self._joined(each.unbind()) for each in finish()]

    def exchanging_back(self, whole: Tensor) -> Callable[[], Tensor]:
        """Begin to send [batch, seq, heads / ranks, C] where its positions are; the result gives this rank's positions
        of all heads, [batch, 2 width, heads, C]."""
        finish = start_exchanging(self.group, torch.stack(self._parted(whole)))
        return lambda: torch.cat(finish()[0].unbind(), dim=2)

    def haloing(self, size: int, *parts: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to gather the last `size` positions of each slice; the result gives this rank's slices behind those
        before them, [2 batch, size + width, ...] each, with zeros before a row."""
        rows = [self.rows(part) for part in parts]
        finish = start_gathering(self.group, *(self._tails(each, size) for each in rows))
        return lambda: [torch.cat((self._ahead(tails), own), dim=1) for tails, own in zip(finish(), rows)]

    def pieces(self, device: torch.device, before: int | None = None) -> list[Piece]:
        """What this rank's positions see, equal shapes together; padding is left out.

        `before`: at most so many keys before each slice, in the rows that `haloing` gives.
        """
        name = f"pieces/{before}"
        if (device, name) not in self._made:
            found: dict[tuple[int, int], list[tuple[int, int]]] = {}
            whole, width = self.whole, self.width
            for number, (start, length) in enumerate(zip(whole.starts, whole.lengths)):
                if number in set(whole.padding):
                    continue
                row, first = divmod(start, whole.seq)
                for at, slice_ in enumerate(self.mine):
                    begin, end = max(first, slice_ * width), min(first + length, (slice_ + 1) * width)
                    if begin < end:
                        place = row * 2 * width + at * width + begin - slice_ * width
                        if before is None:
                            found.setdefault((end - begin, end - first), []).append((place, start))
                        else:
                            seen = end - max(first, begin - before)
                            source = (row * 2 + at) * (before + width) + before + end - slice_ * width - seen
                            found.setdefault((end - begin, seen), []).append((place, source))
            pieces = []
            for (queries, keys), places in found.items():
                with torch.inference_mode(False):  # backward saves them
                    begins = torch.tensor(places)
                    spans = begins[:, :1] + torch.arange(queries), begins[:, 1:] + torch.arange(keys)
                    pieces.append(Piece(*(each.to(device) for each in spans)))
            self._made[device, name] = pieces
        return self._made[device, name]

    # --- recurrences --------------------------------------------------------------------------------------------------

    def rows(self, x: Tensor) -> Tensor:
        """[batch, 2 width, ...] -> a row for each slice, [2 batch, width, ...]."""
        return x.unflatten(1, (2, self.width)).flatten(0, 1)

    def unrows(self, x: Tensor) -> Tensor:
        """[2 batch, width, ...] -> [batch, 2 width, ...]."""
        return x.unflatten(0, (-1, 2)).flatten(1, 2)

    @cached_property
    def _numbers(self) -> Tensor:
        """The documents of the rows of slices, [2 batch, width]."""
        return self.rows(self.cut(self.whole.numbers()))

    def numbers(self, device: torch.device) -> Tensor:
        """The number of each position's document, [2 batch, width]."""
        return self.kept(device, "numbers", lambda: self._numbers)

    def before(self, device: torch.device) -> Tensor:
        """The document of the position before each slice, [2 batch]; -1 before a row."""

        def make() -> Tensor:
            numbers = F.pad(self.whole.numbers(), (1, 0), value=PADDING)
            return numbers[:, [number * self.width for number in self.mine]].flatten()

        return self.kept(device, "before", make)

    @cached_property
    def local(self) -> Documents:
        """The parts of documents in the slices, as documents of a batch of their own."""
        return Documents.from_ids(self._numbers)

    def halo(self, x: Tensor, size: int) -> Tensor:
        """The last `size` positions of the slice before each of this rank's, [2 batch, size, ...]; zeros where another
        document is there. `x` [batch, 2 width, ...]."""
        if self.width < size:
            raise ValueError(
                f"slices of {self.width} tokens: a convolution sees {size} tokens before a slice, and takes them from "
                f"one other; use rows of at least {2 * self.ranks * size} tokens, or fewer context ranks"
            )
        rows = self._ahead(gathered(self.group, self._tails(self.rows(x), size))[0])
        first = self.numbers(x.device)[:, :1]

        def make() -> Tensor:
            numbers = F.pad(self.whole.numbers(), (size, 0), value=PADDING)
            places = torch.tensor([number * self.width for number in self.mine])[:, None] + torch.arange(size)
            return numbers[:, places].flatten(0, 1)

        same = self.kept(x.device, f"halo/{size}", make) == first
        return rows.masked_fill(~same.view(*same.shape, *[1] * (rows.dim() - 2)), 0)

    def carrying(
        self, combine: Callable[[Tensor, Tensor], Tensor], across: Tensor, added: Tensor
    ) -> Callable[[], Tensor]:
        """Begin to gather what each slice does to a state, [2 batch, ...]: `combine(across, state) + added`.

        The result gives the state before each of this rank's slices.
        """
        finish = start_gathering(self.group, *(each.unflatten(0, (-1, 2)) for each in (across, added)))

        def state() -> Tensor:
            steps = zip(*(self._by_slice(each) for each in finish()))
            states = [torch.zeros_like(added.unflatten(0, (-1, 2))[:, 0])]
            for each_across, each_added in steps:
                states.append(combine(each_across, states[-1]) + each_added)
            return torch.stack([states[number] for number in self.mine], dim=1).flatten(0, 1)

        return state

    # --- loss ---------------------------------------------------------------------------------------------------------

    def mean(self, loss: Tensor, labels: Tensor) -> Tensor:
        """The mean over all labels of the rows, from this rank's mean and labels; NaN where there are none.

        Its gradients, averaged over the ranks, are those of the mean.
        """
        count = (labels != IGNORED_LABEL).sum()
        return _Sum.apply(loss.where(count > 0, 0.0) * count, self.group) / _total(count, self.group)

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks of a number without gradients."""
        return _total(value, self.group)

    def average(self, loss: Tensor) -> Tensor:
        """The mean of a number over the ranks; its gradients, averaged over the ranks, are those of the mean."""
        return _Sum.apply(loss, self.group) / self.ranks

    # --- parts --------------------------------------------------------------------------------------------------------

    def _tails(self, rows: Tensor, size: int) -> Tensor:
        """[2 batch, width, ...] -> the last positions, [batch, 2, size, ...]."""
        return rows[:, self.width - size :].unflatten(0, (-1, 2))

    def _ahead(self, tails: Tensor) -> Tensor:
        """Those of all ranks -> of the slice before each of this rank's, [2 batch, size, ...]; zeros before a row."""
        by_slice = self._by_slice(tails)
        found = [by_slice[number - 1] if number else torch.zeros_like(by_slice[0]) for number in self.mine]
        return torch.stack(found, dim=1).flatten(0, 1)

    def _by_slice(self, parts: Tensor) -> list[Tensor]:
        """[ranks, batch, 2, ...] -> [batch, ...] of each slice, first to last."""
        return [*parts[:, :, 0].unbind(), *parts[:, :, 1].flip(0).unbind()]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The slices of each rank, [batch, 2 width, ...] -> the whole rows."""
        split = [part.split(self.width, dim=1) for part in parts]
        return torch.cat([first for first, _ in split] + [second for _, second in reversed(split)], dim=1)

    def _parted(self, whole: Tensor) -> list[Tensor]:
        """The whole rows -> the slices of each rank, [batch, 2 width, ...]."""
        parts = whole.split(self.width, dim=1)
        return [torch.cat((first, last), dim=1) for first, last in zip(parts[: self.ranks], reversed(parts))]


Borders = Documents | Slices
"""What layers are told about where documents begin."""


def require_borders(documents: Any, tokens: Tensor) -> None:
    """Raise unless `documents` are None or those of `tokens`."""
    if not isinstance(documents, Documents | Slices | None):
        raise TypeError(
            f"documents is a {type(documents).__name__}: make it with weft.models.Documents, such as "
            "Documents.from_ids(ids), Documents.from_position_ids(position_ids) or Documents.from_mask(attention_mask)"
        )
    if documents is not None:
        documents.require(tokens)


def context_part(batch: Mapping[str, Any], meshes: Meshes) -> dict[str, Any]:
    """This rank's part of a batch that the ranks of `meshes.cp` share: tensors [batch, seq, ...] by name, "documents".

    Each of these ranks calls it with the same batch. Rows are padded to a multiple of twice the context ranks; "labels"
    of padding and of the last positions of documents are -100. "documents" of the part says which slices it has.

        part = context_part({"tokens": tokens, "labels": labels, "documents": documents}, meshes)
        loss = model(part.pop("tokens"), **part)

    Raises `ValueError` without `meshes.cp`, for tensors of another shape than "tokens", and for what is no tensor, and
    `TypeError` for a batch without "tokens", and for documents that are none or are cut already.
    """
    if meshes.cp is None:
        raise ValueError(
            "meshes have no context ranks: make them with weft.init_meshes(cp=...), or leave this call out"
        )
    if not isinstance(batch, Mapping) or not isinstance(batch.get("tokens"), Tensor):
        raise TypeError('a batch is a dict of tensors [batch, seq, ...], of which one is "tokens"')
    group = group_of(meshes.cp, 0)
    tokens, given = batch["tokens"], batch.get("documents")
    require_borders(given, tokens)
    if isinstance(given, Slices):
        raise TypeError("documents of this batch are slices already: cut each batch once")
    rows, seq = tokens.shape
    shared = 1 if meshes.tp is None else meshes.tp.size()  # the positions of a rank are cut once more
    missing = -seq % (2 * group.size() * shared // math.gcd(2, shared))
    whole = Documents(rows, seq, tuple(range(0, rows * seq, seq))) if given is None else given
    slices = Slices(_padded(whole, missing), group.rank(), group)
    part: dict[str, Any] = {"documents": slices}
    for name, value in batch.items():
        if name == "documents":
            continue
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} is a {type(value).__name__}: beside documents a batch has tensors [batch, seq, ...], which "
                "are cut; leave it out, or give it to the model by itself"
            )
        if value.shape[:2] != tokens.shape:
            raise ValueError(f"{name!r} has shape {list(value.shape)}: it begins with that of tokens, {[rows, seq]}")
        filling = IGNORED_LABEL if name == "labels" else 0
        if name == "labels" and given is not None:
            value = given.labels(value)
        part[name] = slices.cut(F.pad(value, (0, 0) * (value.dim() - 2) + (0, missing), value=filling))
    return part


def _padded(documents: Documents, missing: int) -> Documents:
    """The same with `missing` positions of padding at the end of each row."""
    if not missing:
        return documents
    seq = documents.seq + missing
    starts: list[int] = []
    padding: list[int] = []
    for number, start in enumerate(documents.starts):
        row, place = divmod(start, documents.seq)
        if place == 0 and row:
            padding.append(len(starts))
            starts.append(row * seq - missing)
        if number in documents.padding:
            padding.append(len(starts))
        starts.append(row * seq + place)
    padding.append(len(starts))
    starts.append(documents.batch * seq - missing)
    return Documents(documents.batch, seq, tuple(starts), tuple(padding))


class _Sum(torch.autograd.Function):
    """The sum over the ranks, of which each computes the same from it: its gradient is that of all of them together."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        return _total(value, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.ranks, None


def _total(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_now(value.detach().clone(), dist.ReduceOp.SUM, group, "a loss of context ranks")
