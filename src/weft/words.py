"""Words of messages: a number with its noun, a list of names, and the known word that a misspelled one resembles."""

import difflib
from collections.abc import Iterable


def counted(number: float, noun: str) -> str:
    """Return a number with its noun in the singular or the plural: "1 rank", "2,000 ranks", "2.5 microbatches"."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{shown} {noun}{plural}"


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Return the first `limit` of `names`, and how many more there are: "a, b and 3 more"."""
    names = list(names)
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return a list with the one word in `known` most similar to `word`, ignoring case, or `[]` if none is similar.
    `cutoff`: the least similarity, from 0 to 1 (equal words)."""
    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)]


def choice_of(word: str, known: Iterable[str]) -> str:
    """Return advice for a word that is not in `known`: "did you mean train?" or, if none is similar, all of `known`."""
    known = list(known)
    near = nearest(word, known)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
