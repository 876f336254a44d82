"""The documents in a batch of packed or padded rows.

    row 0   a a a b b .      documents a and b, padding at the end
    row 1   c c c c c c      one document

    position_ids   0 1 2 0 1 0 | 0 1 2 3 4 5
    cu_seqlens     0     3   5 6           12      starts in the flattened batch, then its length
    ids            0 0 0 1 1 -1 | 0 0 0 0 0 0      -1: padding

A position attends only to positions of its own document. A document cannot cross rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.loss import IGNORED_LABEL
from weft.words import counted

PADDING = -1
"""The value that marks padding in the `ids` of `Documents.from_ids`."""


class AttentionLayout(NamedTuple):
    """The positions of all documents, without padding, sorted by the lengths of the documents.

    `order`: the positions, in this order, as indices in the flattened batch. None: the batch already has this order and
    no padding. `groups`: a pair (number of documents, length) for each length, the shortest first.
    """

    order: Tensor | None
    groups: tuple[tuple[int, int], ...]


class ConvolutionLayout(NamedTuple):
    """The flattened batch, with empty places before each document and before each run of padding.

    `places`: the new index of each position. `size`: the number of places, including empty ones.
    """

    places: Tensor
    size: int


@dataclass(frozen=True)
class Documents:
    """The documents in a batch of `batch` rows of `seq` tokens, given by their starts.

    - `starts`: the first position of each document and of each run of padding, in the flattened batch.
    - `padding`: the indices in `starts` of the runs of padding.
    - `continues`: whether the text of each row's last document continues after the row. If so, the loss uses the label
      at the row's last position, which is the first token after the row. Otherwise, the loss ignores this label.

    Two `Documents` are equal if all their fields are equal.

    The constructor checks three rules on the host, and raises `ValueError` if one is broken: The batch has at least one
    position. The starts ascend, are inside the batch, and include the first position of each row. The numbers in
    `padding` are indices of `starts`.

    The methods `from_...` raise `TypeError` for an argument that is not a tensor.
    """

    batch: int
    seq: int
    starts: tuple[int, ...]
    padding: tuple[int, ...] = ()
    continues: bool = False
    _made: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch < 1 or self.seq < 1:
            raise ValueError(f"batch={self.batch}, seq={self.seq}: a batch has at least one row of one token")
        starts = torch.tensor(self.starts, dtype=torch.int64)
        if not len(starts) or starts[0] != 0 or bool((starts[1:] <= starts[:-1]).any()):
            raise ValueError(f"starts={_some(self.starts)}: must begin with 0 and ascend; pass each start once")
        if starts[-1] >= self.batch * self.seq:
            raise ValueError(
                f"starts={_some(self.starts)}: the last document begins after the end of the batch of {self.batch} x "
                f"{counted(self.seq, 'token')}; starts are at most {self.batch * self.seq - 1}"
            )
        rows = torch.arange(self.batch) * self.seq
        missing = rows[~torch.isin(rows, starts)]
        if len(missing):
            raise ValueError(
                f"row {int(missing[0]) // self.seq} begins inside a document: documents cannot cross rows of "
                f"{counted(self.seq, 'token')}; add the start {int(missing[0])}"
            )
        if not set(self.padding) <= set(range(len(self.starts))):
            raise ValueError(f"padding={self.padding}: must be indices of starts, from 0 to {len(self.starts) - 1}")

    # --- constructors -------------------------------------------------------------------------------------------------

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> "Documents":
        """Create documents from positions [batch, seq] that restart with 0 at each document, as in transformers.

        Padding is not recognized: it counts as tokens of documents. Raises `ValueError` for a position that is neither
        0 nor one more than the position before it.
        """
        positions = _integers("position_ids", position_ids, "[batch, seq]")
        begins = positions == 0
        goes_on = torch.zeros_like(begins)
        goes_on[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
        if bool((wrong := ~(begins | goes_on)).any()):
            row, place = wrong.nonzero()[0].tolist()
            before = f"after {int(positions[row, place - 1])}" if place else "at the beginning of the row"
            raise ValueError(
                f"position_ids[{row}, {place}] is {int(positions[row, place])} {before}: a document's positions are "
                "0, 1, 2, ...; let each document begin with 0"
            )
        return cls(positions.shape[0], positions.shape[1], tuple(begins.flatten().nonzero()[:, 0].tolist()))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, batch: int, seq: int) -> "Documents":
        """Create documents from cumulative lengths in the flattened batch, `[0, n_1, n_1 + n_2, ..., batch * seq]`.

        Padding is not recognized: it counts as tokens of documents. The lengths must begin with 0, ascend and end with
        `batch * seq`, and no document may cross rows. Otherwise this method raises `ValueError`.
        """
        *starts, end = _integers("cu_seqlens", cu_seqlens, "[documents + 1]").tolist()
        if end != batch * seq:
            raise ValueError(
                f"cu_seqlens ends with {end}: the lengths must add up to batch * seq = {batch} * {seq} = {batch * seq}"
            )
        return cls(batch, seq, tuple(starts))

    @classmethod
    def from_ids(cls, ids: Tensor) -> "Documents":
        """Create documents from a number for each position, [batch, seq].

        The number is the same for all positions of a document, and -1 in padding. Documents in different rows are
        different, even if they have the same number. Raises `ValueError` for a number below -1, and for a document
        number that occurs again in the same row after another number.
        """
        ids = _integers("ids", ids, "[batch, seq]")
        if bool((ids < PADDING).any()):
            raise ValueError(f"ids has {int(ids.min())}: document numbers must be at least 0, or {PADDING} for padding")
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = begins.flatten().nonzero()[:, 0]
        numbers, rows = ids.flatten()[starts], starts // ids.shape[1]
        seen: set[tuple[int, int]] = set()
        for row, number, start in zip(rows.tolist(), numbers.tolist(), starts.tolist()):
            if number != PADDING and (row, number) in seen:
                raise ValueError(
                    f"ids[{row}, {start % ids.shape[1]}] is {number}, which appears before another number in this row: "
                    "the tokens of a document must be contiguous; number each document differently"
                )
            seen.add((row, number))
        padding = (numbers == PADDING).nonzero()[:, 0].tolist()
        return cls(ids.shape[0], ids.shape[1], tuple(starts.tolist()), tuple(padding))

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> "Documents":
        """Create documents from a mask [batch, seq]: 1 or True at tokens, 0 at padding.

        Each row is one document, with padding on the left, on the right or on both sides. Raises `ValueError` for a row
        with padding between tokens.
        """
        mask = attention_mask
        if isinstance(mask, Tensor) and bool((is_one := mask == 1).logical_or(mask == 0).all()):
            mask = is_one.long()  # floating-point masks are common too
        mask = _integers("attention_mask", mask, "[batch, seq]")
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(
                "attention_mask has values other than 0 and 1; for several documents use Documents.from_ids"
            )
        begins = mask.diff(dim=1, prepend=torch.zeros_like(mask[:, :1])) == 1
        if bool((several := begins.sum(1) > 1).any()):
            raise ValueError(
                f"attention_mask has padding between tokens of row {int(several.nonzero()[0])}: each row is one "
                f"document; for several documents use Documents.from_ids"
            )
        return cls.from_ids(mask - 1)

    # --- properties ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the batch, (batch, seq)."""
        return self.batch, self.seq

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each document and of each run of padding."""
        ends = (*self.starts[1:], self.batch * self.seq)
        return tuple(end - start for start, end in zip(self.starts, ends))

    @property
    def is_plain(self) -> bool:
        """Whether each row is one document without padding. Layers then compute the same as without `Documents`."""
        return len(self.starts) == self.batch and not self.padding

    def numbers(self, device: torch.device | str = "cpu") -> Tensor:
        """Return each position's document or run of padding, as an index into `starts`, [batch, seq] int64."""

        def make() -> Tensor:
            lengths = torch.tensor(self.lengths)
            return torch.repeat_interleave(torch.arange(len(lengths)), lengths).view(self.shape)

        return self.kept(device, "numbers", make)

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the position of each token in its document or run of padding, from 0, [batch, seq] int64."""

        def make() -> Tensor:
            starts = torch.tensor(self.starts)[self.numbers()]
            return torch.arange(self.batch * self.seq).view(self.shape) - starts

        return self.kept(device, "position_ids", make)

    def reaches(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the length of each position's document, [batch, seq] int64. It is 0 in padding."""

        def make() -> Tensor:
            lengths = torch.tensor([0 if i in self.padding else length for i, length in enumerate(self.lengths)])
            return lengths[self.numbers()]

        return self.kept(device, "reaches", make)

    def cu_seqlens(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the starts of documents and of runs of padding in the flattened batch, followed by the length of the
        flattened batch, as int32. Variable-length attention kernels take cumulative lengths in this form."""
        return self.kept(device, "cu_seqlens", lambda: torch.tensor([*self.starts, self.batch * self.seq]).int())

    def labels(self, labels: Tensor) -> Tensor:
        """Return `labels` [batch, seq] with -100 at the last position of each document (see `continues`) and in
        padding."""
        self.require(labels)

        def make() -> Tensor:
            without = self._in_padding().view(self.shape)
            ends = without.clone().flatten()
            ends[torch.tensor([*self.starts[1:], self.batch * self.seq]) - 1] = True
            ends = ends.view(self.shape)
            if self.continues:
                ends[:, -1] = without[:, -1]
            return ends

        return labels.masked_fill(self.kept(labels.device, "labels", make), IGNORED_LABEL)

    def following(self, values: Tensor, places: int, filling: int) -> Tensor:
        """Return `values` [batch, seq] shifted left by `places` within each document. The end of each document is
        filled with `filling`."""
        self.require(values)
        moved = F.pad(values[:, places:], (0, min(places, self.seq)), value=filling)
        numbers = self.numbers(values.device)
        other = F.pad(numbers[:, places:], (0, min(places, self.seq)), value=PADDING)
        return moved.masked_fill(other != numbers, filling)

    def require(self, values: Tensor) -> None:
        """Raise `ValueError` if `values` do not have the shape of this batch."""
        if values.shape != self.shape:
            raise ValueError(
                f"documents of {counted(self.batch, 'row')} of {counted(self.seq, 'token')} do not fit a tensor of "
                f"shape {list(values.shape)}: create them for this batch"
            )

    def attention(self, device: torch.device) -> AttentionLayout:
        """Return the documents grouped by length, without padding."""
        if (device, "attention") not in self._made:
            lengths = self.lengths
            kept = [number for number in range(len(lengths)) if number not in set(self.padding)]
            kept.sort(key=lambda number: lengths[number])
            counts: dict[int, int] = {}
            for number in kept:
                counts[lengths[number]] = counts.get(lengths[number], 0) + 1
            order: Tensor | None = None
            if kept != list(range(len(lengths))):
                places = [torch.arange(lengths[each]) + self.starts[each] for each in kept]
                order = self._placed(torch.cat(places) if places else torch.zeros(0, dtype=torch.int64), device)
            layout = AttentionLayout(order, tuple((count, length) for length, count in counts.items()))
            self._made[device, "attention"] = layout
        return self._made[device, "attention"]

    def convolution(self, before: int, device: torch.device) -> ConvolutionLayout:
        """Return a layout with `before` empty places before each document and before each run of padding."""
        places = self.kept(
            device,
            f"convolution/{before}",
            lambda: torch.arange(self.batch * self.seq) + before * (self.numbers().flatten() + 1),
        )
        return ConvolutionLayout(places, self.batch * self.seq + before * len(self.starts))

    def kept(self, device: torch.device | str, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make()`, moved to `device`. This object caches the result by `device` and `name`."""
        key = torch.device(device), name
        if key not in self._made:
            self._made[key] = self._placed(make(), key[0])
        return self._made[key]

    # --- parts --------------------------------------------------------------------------------------------------------

    def _in_padding(self) -> Tensor:
        """Return which positions are padding, [batch * seq] bool."""
        return torch.isin(self.numbers().flatten(), torch.tensor(self.padding, dtype=torch.int64))

    @staticmethod
    def _placed(tensor: Tensor, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training later
            return tensor.clone().to(device) if tensor.is_inference() else tensor.to(device)


def _integers(name: str, values: Any, shape: str) -> Tensor:
    """Return the tensor `values` as int64 on the host. `shape`: the expected dimensions, such as "[batch, seq]".

    Raises `TypeError` if `values` are not a tensor. Raises `ValueError` if they are empty, have a floating-point dtype,
    or have another number of dimensions than `shape`.
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} is a {type(values).__name__}: pass a tensor of integers {shape}")
    if values.dim() != shape.count(",") + 1 or values.is_floating_point() or not values.numel():
        needed = f"{'integers' if values.numel() else 'at least one integer'} {shape}"
        raise ValueError(f"{name} has shape {list(values.shape)} and dtype {values.dtype}: pass {needed}")
    return values.detach().cpu().long()


def _some(values: tuple[int, ...]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
