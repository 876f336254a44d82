"""Explains how a step on several ranks differs from the step on one rank.

A line names the parameters, the mesh axes and the broken rule, as far as they are known.

what differs              what it means
------------------------  ---------------------------------------------------------------------------------------------
names, initial weights    a stage has layers under wrong names, or a rank's part does not match its placement
losses                    the forward pass is wrong
gradients                 - missing on some ranks
                          - not reduced over an axis: their sum or mean over the ranks of the axis is right
                          - counted or divided too often: wrong by a factor, usually the size of an axis or its inverse
                          - other errors: the ranks with wrong gradients are named
the norm for clipping     a parameter is left out, or counted more than once
clipped gradients         clipping leaves a parameter out
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isclose, isfinite

import torch
from torch import Tensor

from weft.words import counted, listed

CLOSE = 1e-7
"""The largest difference between weights or gradients that counts as rounding, relative to the largest element. Both
steps run in fp64, except a few sums in fp32."""
_SHOWN = 6
"""The largest number of lines about gradients if the losses are wrong too."""


@dataclass(frozen=True)
class Alone:
    """The results of the step on one rank.

    - `losses`: one for each microbatch.
    - `weights`, `gradients`: the initial weights and their gradients, by parameter name.
    - `norm`: the norm of all gradients together.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    norm: float


@dataclass(frozen=True)
class Seen:
    """The results of the step on one of several ranks. Tensors are unsharded, and given by parameter name.

    - `at`: the rank's coordinate on each mesh axis.
    - `losses`: index -> loss, for this rank's microbatches. The indices count the microbatches of all ranks.
    - `norm`: the norm that clipping computed.
    - `clipped`: the gradients after clipping.
    - `squares`: for each parameter, the squared norm that clipping computes if all elements of this parameter's
      gradient are 1 and all other gradients are 0. It must be the number of elements.
    - `factor`: the factor by which clipping must scale the gradients.
    - `marks`: for each parameter, text that says how it is sharded.
    - `missing`: parameters that have no gradient on this rank, although the step on one rank computes a nonzero one.
    """

    at: dict[str, int]
    losses: dict[int, float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    norm: float
    clipped: dict[str, Tensor]
    squares: dict[str, float]
    factor: float
    marks: dict[str, str]
    missing: list[str]


def findings(alone: Alone, seen: Sequence[Seen]) -> list[str]:
    """Return lines about the faults of the step on several ranks; [] if there are none. `seen`: one entry per rank."""
    found = _names(alone, seen) or _weights(alone, seen)
    if found:
        return found
    found = _losses(alone, seen)
    gradients = _gradients(alone, seen)
    if found and len(gradients) > _SHOWN:
        return found + gradients[:_SHOWN] + [f"{counted(len(gradients) - _SHOWN, 'more line')} about gradients"]
    return found + gradients or _norm(alone, seen) + _clipped(alone, seen)


def _names(alone: Alone, seen: Sequence[Seen]) -> list[str]:
    rule = "The stages together have the parameters of the whole model, under the same names"
    there = {name for each in seen for name in each.weights}
    lost = [name for name in alone.weights if name not in there]
    lines = [f"{listed(lost)}: on no rank. {rule}."] if lost else []
    strange = sorted(there - set(alone.weights))
    if strange:
        lines.append(f"{listed(strange)}: on a rank, but not in the model. {rule}.")
    shapes = [
        name
        for name, weight in alone.weights.items()
        if any(name in each.weights and each.weights[name].shape != weight.shape for each in seen)
    ]
    if shapes:
        lines.append(f"{listed(shapes)}: the parts together have another shape than on one rank. {rule}.")
    return lines


def _weights(alone: Alone, seen: Sequence[Seen]) -> list[str]:
    lines: dict[str, list[str]] = defaultdict(list)
    for name, weight in alone.weights.items():
        wrong = [
            rank for rank, each in enumerate(seen) if name in each.weights and not _same(each.weights[name], weight)
        ]
        if not wrong:
            continue
        here = seen[wrong[0]].weights[name]
        like = [other for other, theirs in alone.weights.items() if theirs.shape == here.shape and _same(here, theirs)]
        what = f"is that of {like[0]} of the whole model" if like else "differs from that of one rank"
        axes = f" (axes: {seen[wrong[0]].marks[name]})"
        lines[
            f"first weight {what} on {_ranks(wrong, seen)}{axes}. First weights depend only on the seed and the name, "
            f"so a stage must name its layers as the whole model does."
        ].append(name)
    return [f"{listed(names)}: {line}" for line, names in lines.items()]


def _losses(alone: Alone, seen: Sequence[Seen]) -> list[str]:
    wrong: dict[int, list[int]] = defaultdict(list)
    for rank, each in enumerate(seen):
        for number, loss in each.losses.items():
            if not _near(loss, alone.losses[number], 1e-9):
                wrong[rank].append(number)
    if not wrong:
        return []
    first = min(wrong)
    number = wrong[first][0]
    return [
        f"loss of microbatch {number} on rank {first}: {seen[first].losses[number]:.9g}, but "
        f"{alone.losses[number]:.9g} on one rank; wrong on {_ranks(sorted(wrong), seen)}. Every rank must return the "
        f"loss of one process{_unlike_along(seen, {rank: seen[rank].losses for rank in wrong})}."
    ]


def _gradients(alone: Alone, seen: Sequence[Seen]) -> list[str]:
    lines: dict[str, list[str]] = defaultdict(list)
    for name, expected in alone.gradients.items():
        here = {rank: each.gradients[name] for rank, each in enumerate(seen) if name in each.gradients}
        wrong = [rank for rank, gradient in here.items() if not _same(gradient, expected)]
        if wrong:
            without = [rank for rank in wrong if name in seen[rank].missing]
            said = _explained(expected, here, wrong, without, seen)
            lines[f"{said} (axes of the weight: {seen[wrong[0]].marks[name]})"].append(name)
    return [f"gradient of {listed(names)}: {line}" for line, names in lines.items()]


def _explained(
    expected: Tensor, here: dict[int, Tensor], wrong: list[int], without: list[int], seen: Sequence[Seen]
) -> str:
    """Return why a parameter's gradient is wrong, as text. The table of this module lists the reasons.

    `expected`: the gradient on one rank. `here`: rank -> gradient. `wrong`: ranks whose gradient differs from
    `expected`. `without`: the ranks of `wrong` that have no gradient.
    """
    if without:
        return f"it is missing on {_ranks(without, seen)}. A parameter that trains must get its gradient on every rank."
    sizes = {axis: 1 + max(each.at[axis] for each in seen) for axis in seen[0].at}
    for axis, size in sizes.items():
        if size == 1 or axis == "pp":
            continue
        rows = _rows(axis, list(here), seen)
        if all(_same(here[row[0]], here[rank]) for row in rows for rank in row):
            continue
        for what, total in (("sum", 1.0), ("mean", 1.0 / size)):
            if all(_same(torch.stack([here[rank] for rank in row]).sum(0) * total, expected) for row in rows):
                return (
                    f"partial over {axis}, and not reduced: its ranks have different values, whose {what} is the "
                    f"gradient. A parameter that is the same on all ranks of {axis} needs its gradient reduced over "
                    f"{axis}."
                )
    factors = {_factor(here[rank], expected) for rank in here}
    if len(factors) == 1 and (factor := factors.pop()) is not None:
        fits = [axis for axis, size in sizes.items() if size > 1 and (_near(factor, size) or _near(factor, 1 / size))]
        axes = f", the number of ranks of {' or '.join(fits)}" if fits else ""
        if factor == 0:
            return "it is 0 on all ranks. The gradients that a rank computes must reach the ranks that keep them."
        times = f"{factor:.6g} times" if factor >= 1 else f"1 / {1 / factor:.6g} of"
        return (
            f"{times} that of one rank{axes}. A gradient is the mean over data-parallel ranks. That of an expert is "
            f"divided by the number of ranks whose tokens it sees. Each part is counted once."
        )
    return (
        f"wrong on {_ranks(wrong, seen)}{_unlike_along(seen, here)}. The gradient must equal that of one process: its "
        f"parts are reduced over the ranks that hold parts of it, and over no others."
    )


def _norm(alone: Alone, seen: Sequence[Seen]) -> list[str]:
    wrong = [rank for rank, each in enumerate(seen) if not _near(each.norm, alone.norm)]
    lines: dict[str, list[str]] = defaultdict(list)
    for name, weight in alone.weights.items():
        counts = [each.squares[name] / weight.numel() for each in seen]
        if all(_near(count, 1) for count in counts):
            continue
        if not any(counts):
            lines["left out"].append(name)
        elif all(_near(count, counts[0]) for count in counts):
            lines[f"counted {counts[0]:.4g} times"].append(name)
        else:
            least, most = min(counts), max(counts)
            lines[f"counted differently on the ranks, from {least:.4g} to {most:.4g} times"].append(name)
    first = wrong[0] if wrong else 0
    rule = (
        f"The norm for clipping is {seen[first].norm:.9g} on rank {first}, but {alone.norm:.9g} on one rank: every "
        f"parameter must count once, wherever it lies"
    )
    if wrong and not lines:
        return [
            f"norm for clipping: wrong on {_ranks(wrong, seen)}, although each parameter alone counts once. {rule}."
        ]
    marks = {name: mark for each in seen for name, mark in each.marks.items()}
    return [
        f"norm for clipping: {listed(names)} {'is' if len(names) == 1 else 'are'} {how} "
        f"(axes of the weight: {marks[names[0]]}). {rule}."
        for how, names in lines.items()
    ]


def _clipped(alone: Alone, seen: Sequence[Seen]) -> list[str]:
    if any(not _near(each.norm, alone.norm) for each in seen):
        return []
    names = [
        name
        for name, gradient in alone.gradients.items()
        if any(name in each.clipped and not _same(each.clipped[name], gradient * each.factor, 1e-5) for each in seen)
    ]
    return (
        [
            f"{listed(names)}: not scaled by clipping like all others. Clipping must scale all gradients by the same "
            f"factor."
        ]
        if names
        else []
    )


# --- helpers ----------------------------------------------------------------------------------------------------------


def _same(one: Tensor, other: Tensor, close: float = CLOSE) -> bool:
    size = max(other.abs().max().item(), 1e-9) if other.numel() else 1.0
    return one.shape == other.shape and not bool(((one - other).abs() > close * size).any() or one.isnan().any())


def _near(one: float, other: float, close: float = 1e-6) -> bool:
    return isfinite(one) and isclose(one, other, rel_tol=close, abs_tol=1e-12)


def _factor(here: Tensor, expected: Tensor) -> float | None:
    """Return the factor for which `here = factor * expected`, or None if there is none."""
    square = expected.square().sum()
    if not square:
        return None
    factor = ((here * expected).sum() / square).item()
    return round(factor, 9) if _same(here, expected * factor) else None


def _rows(axis: str, ranks: list[int], seen: Sequence[Seen]) -> list[list[int]]:
    """Return the groups of `ranks` along the mesh axis `axis`."""
    place = {rank: tuple(where for name, where in seen[rank].at.items() if name != axis) for rank in ranks}
    ordered = sorted(ranks, key=lambda rank: (place[rank], rank))
    return [list(row) for _, row in groupby(ordered, key=place.__getitem__)]


def _unlike_along(seen: Sequence[Seen], here: Mapping[int, object]) -> str:
    """Return text that names the mesh axes along which values differ, or "" if they are equal. `here`: rank ->
    value."""
    unlike = []
    for axis in seen[0].at:
        rows = _rows(axis, list(here), seen)
        if any(not _alike(here[row[0]], here[rank]) for row in rows for rank in row):
            unlike.append(axis)
    return f", with different values along {' and '.join(unlike)}" if unlike else ""


def _alike(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same(one, other)
    return one == other


def _ranks(ranks: Sequence[int], seen: Sequence[Seen]) -> str:
    if len(ranks) == len(seen):
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {len(seen)}"
