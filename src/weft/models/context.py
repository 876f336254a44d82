"""Context parallelism: the rows of a batch are cut over the ranks of a mesh axis, and layers exchange tensors.

With cp ranks, every row is cut into 2 x cp equal slices. Rank r has slices r and 2 x cp - 1 - r, so that causal
attention over whole rows is the same amount of work on each rank. With cp = 2:

    row        0 0 1 1 2 2 3 3        the number of each position's slice
    rank 0     0 0 3 3
    rank 1     1 1 2 2

    symbol    exchanged                                                     bytes
    *         `context_attention="heads"`: heads, by an all-to-all          grow with the row
              "gather": keys and values of all positions                    grow with the row
              "gather" with a window of at most one slice: the keys and     constant
              values just before each slice
    +         latents and rotated keys of all positions                     grow with the row, but are fewer
    M, G, K   the convolution's inputs just before each slice, then the     constant
              factor and the summand with which a slice updates the state
    P         the same as for * and for M

For the symbols of layers see `weft.models.pattern`. The collectives for these exchanges run on the lane "context", a
communication queue beside the computation. The backward of a gather sums the gradients over the ranks.
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
    """The parts of documents in this rank's slices that have S queries and T keys (see `Slices.pieces`).

    `queries` [parts, S]: indices into the flattened slices. `keys` [parts, T]: indices into the flattened tensor that
    `Slices.pieces` describes. The last S keys of a part are at the same positions as its queries.
    """

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Slices:
    """This rank's two slices of each row of a batch. Layers accept a `Documents` or a `Slices` as `documents`.

    `whole`: the documents of the whole batch, whose rows are padded to a multiple of 2 x `ranks`. `group`: the process
    group of the ranks over which the rows are cut. `rank`: this rank's number in the group. Tensors of the slices
    have the shape [batch, 2 width, ...], where width is the length of a slice.
    """

    whole: Documents
    rank: int = field(compare=False)
    group: Any = field(repr=False, compare=False)
    _made: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    is_plain = False

    @property
    def ranks(self) -> int:
        """The number of ranks over which the rows are cut."""
        return self.group.size()

    @property
    def width(self) -> int:
        """The length of a slice."""
        return self.whole.seq // (2 * self.ranks)

    @property
    def mine(self) -> tuple[int, int]:
        """The numbers of this rank's slices."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def require(self, values: Tensor) -> None:
        """Raise `ValueError` if `values` do not have the shape of this rank's slices, [batch, 2 width]."""
        if values.shape != (self.whole.batch, 2 * self.width):
            raise ValueError(
                f"slices of {self.whole.batch} rows, 2 x {self.width} tokens each do not fit a tensor of shape "
                f"{list(values.shape)}: create them with weft.models.context_part"
            )

    def cut(self, values: Tensor) -> Tensor:
        """Return this rank's slices, [batch, 2 width, ...], of `values` [batch, seq, ...]."""
        parts = values.split(self.width, dim=1)
        return torch.cat([parts[number] for number in self.mine], dim=1)

    # --- the methods of Documents that layers use ---------------------------------------------------------------------

    def position_ids(self, device: torch.device) -> Tensor:
        """Return this rank's slices of `Documents.position_ids`, [batch, 2 width]."""
        return self.kept(device, "position_ids", lambda: self.cut(self.whole.position_ids()))

    def reaches(self, device: torch.device) -> Tensor:
        """Return this rank's slices of `Documents.reaches` (document lengths), [batch, 2 width]."""
        return self.kept(device, "reaches", lambda: self.cut(self.whole.reaches()))

    def labels(self, labels: Tensor) -> Tensor:
        """Return `labels` unchanged: `context_part` has masked them."""
        return labels

    def following(self, values: Tensor, places: int, filling: int) -> Tensor:
        """Shift the whole rows as `Documents.following` does, and return this rank's slices of the result.

        `values`: this rank's slices before the shift. Collective: all slices are gathered first.
        """
        whole = self._joined(gathered(self.group, values)[0].unbind())
        return self.cut(self.whole.following(whole, places, filling))

    def kept(self, device: torch.device, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make()`, moved to `device`. It is cached in this object by `device` and `name`."""
        if (device, name) not in self._made:
            with torch.inference_mode(False):
                self._made[device, name] = make().to(device)
        return self._made[device, name]

    # --- attention ----------------------------------------------------------------------------------------------------

    def gathering(self, *parts: Tensor) -> Callable[[], list[Tensor]]:
        """Start to gather `parts`, this rank's slices [batch, 2 width, ...] of some tensors.

        The returned function waits and returns the whole rows of each tensor, [batch, seq, ...].
        """
        finish = start_gathering(self.group, *parts)
        return lambda: [self._joined(each.unbind()) for each in finish()]

    def exchanging(self, *parts: Tensor) -> Callable[[], list[Tensor]]:
        """Start to send an equal share of the heads to each rank. `parts`: tensors [batch, 2 width, heads, C].

        The returned function waits and returns this rank's heads of the whole rows, [batch, seq, heads / ranks, C].
        """
        by_rank = (torch.stack(part.chunk(self.ranks, dim=2)) for part in parts)
        finish = start_exchanging(self.group, *by_rank)
        return lambda: [self._joined(each.unbind()) for each in finish()]

    def exchanging_back(self, whole: Tensor) -> Callable[[], Tensor]:
        """Start the reverse of `exchanging`: send each rank its positions of `whole` [batch, seq, heads / ranks, C].

        The returned function waits and returns all heads of this rank's positions, [batch, 2 width, heads, C].
        """
        finish = start_exchanging(self.group, torch.stack(self._parted(whole)))
        return lambda: torch.cat(finish()[0].unbind(), dim=2)

    def haloing(self, size: int, *parts: Tensor) -> Callable[[], list[Tensor]]:
        """Start to gather the last `size` positions of each slice of `parts` [batch, 2 width, ...].

        The returned function waits and returns this rank's slices of each part, with `size` more positions in front of
        each slice: [2 batch, size + width, ...]. These are the positions before the slice, or zeros if the slice is the
        first of its row. `size` is at most the length of a slice.
        """
        rows = [self.rows(part) for part in parts]
        finish = start_gathering(self.group, *(self._tails(each, size) for each in rows))
        return lambda: [torch.cat((self._ahead(tails), own), dim=1) for tails, own in zip(finish(), rows)]

    def pieces(self, device: torch.device, before: int | None = None) -> list[Piece]:
        """Return which keys this rank's queries see. Padding has no queries and no keys.

        A document has a part in each slice that it reaches. The part's queries are the document's positions in the
        slice. Its keys are the document's positions up to the last query. All parts with equal numbers of queries and
        of keys are in one `Piece`.

        `before`: the largest number of keys before its slice that a query sees. If given, `Piece.keys` are indices into
        the flattened result of `haloing` with this size. Default: a query sees all earlier keys, and `Piece.keys` are
        indices into the flattened whole rows.
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
                with torch.inference_mode(False):  # backward saves these tensors
                    begins = torch.tensor(places)
                    spans = begins[:, :1] + torch.arange(queries), begins[:, 1:] + torch.arange(keys)
                    pieces.append(Piece(*(each.to(device) for each in spans)))
            self._made[device, name] = pieces
        return self._made[device, name]

    # --- recurrences --------------------------------------------------------------------------------------------------

    def rows(self, x: Tensor) -> Tensor:
        """Return `x` [batch, 2 width, ...] with a row per slice, [2 batch, width, ...]."""
        return x.unflatten(1, (2, self.width)).flatten(0, 1)

    def unrows(self, x: Tensor) -> Tensor:
        """Return `x` [2 batch, width, ...] with both slices in one row, [batch, 2 width, ...]."""
        return x.unflatten(0, (-1, 2)).flatten(1, 2)

    @cached_property
    def _numbers(self) -> Tensor:
        """The result of `numbers`, in CPU memory."""
        return self.rows(self.cut(self.whole.numbers()))

    def numbers(self, device: torch.device) -> Tensor:
        """Return each position's document or run of padding, as an index into `whole.starts`, [2 batch, width]."""
        return self.kept(device, "numbers", lambda: self._numbers)

    def before(self, device: torch.device) -> Tensor:
        """Return the document index (`numbers`) of the position before each slice, [2 batch]; -1 where a row begins."""

        def make() -> Tensor:
            numbers = F.pad(self.whole.numbers(), (1, 0), value=PADDING)
            return numbers[:, [number * self.width for number in self.mine]].flatten()

        return self.kept(device, "before", make)

    @cached_property
    def local(self) -> Documents:
        """The documents in this rank's slices, as a batch with a row per slice, [2 batch, width].

        Documents are cut at the borders of slices. Runs of padding count as documents.
        """
        return Documents.from_ids(self._numbers)

    def halo(self, x: Tensor, size: int) -> Tensor:
        """Return the `size` positions before each of this rank's slices of `x` [batch, 2 width, ...].

        The result is [2 batch, size, ...]. It is zero at positions that are not in the same document as the first
        position of the slice. Collective. Raises `ValueError` if a slice has fewer than `size` positions.
        """
        if self.width < size:
            raise ValueError(
                f"slices of {self.width} tokens: a convolution needs the {size} tokens before its slice from a single "
                f"other slice; use rows of at least {2 * self.ranks * size} tokens, or fewer context ranks"
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
        """Start to gather `across` and `added`, [2 batch, ...], which describe what each slice does to a state.

        If `state` is the state before a slice, `combine(across, state) + added` is the state after it. The state at the
        beginning of a row is 0. The returned function waits and returns the state before each of this rank's slices.
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
        """Return the mean loss over all labels of the whole rows, or NaN if they have no labels.

        `loss`: this rank's mean over its `labels`. Backward scales the gradient on each rank so that the average over
        the ranks is the gradient of the returned mean.
        """
        count = (labels != IGNORED_LABEL).sum()
        return _Sum.apply(loss.where(count > 0, 0.0) * count, self.group) / _total(count, self.group)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a number over the ranks, without gradients."""
        return _total(value, self.group)

    def average(self, loss: Tensor) -> Tensor:
        """Return the mean of `loss` over the ranks. Backward scales the gradient as for `mean`."""
        return _Sum.apply(loss, self.group) / self.ranks

    # --- parts --------------------------------------------------------------------------------------------------------

    def _tails(self, rows: Tensor, size: int) -> Tensor:
        """Return the last `size` positions, [batch, 2, size, ...], of `rows` [2 batch, width, ...]."""
        return rows[:, self.width - size :].unflatten(0, (-1, 2))

    def _ahead(self, tails: Tensor) -> Tensor:
        """Select, from the tails of all ranks (see `_tails`), the tail before each of this rank's slices. Return these
        tails, [2 batch, size, ...]. At the beginning of a row, the tail is zeros."""
        by_slice = self._by_slice(tails)
        found = [by_slice[number - 1] if number else torch.zeros_like(by_slice[0]) for number in self.mine]
        return torch.stack(found, dim=1).flatten(0, 1)

    def _by_slice(self, parts: Tensor) -> list[Tensor]:
        """Return `parts` [ranks, batch, 2, ...] as one tensor [batch, ...] per slice, in the order of the row."""
        return [*parts[:, :, 0].unbind(), *parts[:, :, 1].flip(0).unbind()]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the slices of each rank, [batch, 2 width, ...], into the whole rows, [batch, seq, ...]."""
        split = [part.split(self.width, dim=1) for part in parts]
        return torch.cat([first for first, _ in split] + [second for _, second in reversed(split)], dim=1)

    def _parted(self, whole: Tensor) -> list[Tensor]:
        """Split the whole rows into the slices of each rank, [batch, 2 width, ...]."""
        parts = whole.split(self.width, dim=1)
        return [torch.cat((first, last), dim=1) for first, last in zip(parts[: self.ranks], reversed(parts))]


Borders = Documents | Slices
"""The type of the argument `documents` of layers."""


def require_borders(documents: Any, tokens: Tensor) -> None:
    """Raise `TypeError` unless `documents` are None, a `Documents` or a `Slices`. Raise `ValueError` if they do not fit
    `tokens`."""
    if not isinstance(documents, Documents | Slices | None):
        raise TypeError(
            f"documents is a {type(documents).__name__}: create it with weft.models.Documents, such as "
            "Documents.from_ids(ids), Documents.from_position_ids(position_ids) or Documents.from_mask(attention_mask)"
        )
    if documents is not None:
        documents.require(tokens)


def context_part(batch: Mapping[str, Any], meshes: Meshes) -> dict[str, Any]:
    """Return this rank's part of a batch whose rows are cut over the ranks of `meshes.cp`.

    `batch`: a dict of tensors [batch, seq, ...], equal on all of these ranks, with the key "tokens". It may also have
    the key "documents", with a `Documents`.

        part = context_part({"tokens": tokens, "labels": labels, "documents": documents}, meshes)
        loss = model(part.pop("tokens"), **part)

    The result always has "documents": a `Slices`, which the model takes in place of a `Documents`.

    Rows are padded at their end to a multiple of 2 x cp. With tensor-parallel ranks, they are padded to a multiple of
    cp x lcm(2, tp). "labels" are padded with -100, all other tensors with 0. If the batch has "documents", labels are
    also set to -100 at the last position of each document (for the exception see `Documents.continues`) and where
    `documents` have padding.

    Raises:
        ValueError: `meshes.cp` is None, a value is not a tensor, or the shape of a tensor or of "documents" does not
            fit "tokens".
        TypeError: the batch has no tensor "tokens", or "documents" is not a `Documents`. A `Slices` is rejected too:
            its batch is already cut.
    """
    if meshes.cp is None:
        raise ValueError(
            "meshes have no context ranks: create them with weft.init_meshes(cp=...), or leave this call out"
        )
    if not isinstance(batch, Mapping) or not isinstance(batch.get("tokens"), Tensor):
        raise TypeError('pass a batch as a dict of tensors [batch, seq, ...] with the key "tokens"')
    group = group_of(meshes.cp, 0)
    tokens, given = batch["tokens"], batch.get("documents")
    require_borders(given, tokens)
    if isinstance(given, Slices):
        raise TypeError("documents of this batch are already slices: cut each batch once")
    rows, seq = tokens.shape
    shared = 1 if meshes.tp is None else meshes.tp.size()  # tensor-parallel ranks cut a rank's positions again
    missing = -seq % (2 * group.size() * shared // math.gcd(2, shared))
    whole = Documents(rows, seq, tuple(range(0, rows * seq, seq))) if given is None else given
    slices = Slices(_padded(whole, missing), group.rank(), group)
    part: dict[str, Any] = {"documents": slices}
    for name, value in batch.items():
        if name == "documents":
            continue
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} is a {type(value).__name__}: a batch with documents can contain only tensors [batch, seq, "
                f"...], which are cut; leave it out, or pass it to the model separately"
            )
        if value.shape[:2] != tokens.shape:
            raise ValueError(
                f"{name!r} has shape {list(value.shape)}: it must begin with the shape of tokens, {[rows, seq]}"
            )
        filling = IGNORED_LABEL if name == "labels" else 0
        if name == "labels" and given is not None:
            value = given.labels(value)
        part[name] = slices.cut(F.pad(value, (0, 0) * (value.dim() - 2) + (0, missing), value=filling))
    return part


def _padded(documents: Documents, missing: int) -> Documents:
    """Return `documents` with `missing` positions of padding added at the end of each row."""
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
    """The sum over the ranks. Backward multiplies the gradient by the number of ranks. Context-parallel ranks count as
    data-parallel ranks, so gradients are later averaged over them. The factor turns this average into a sum."""

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
