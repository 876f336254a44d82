"""Gives exchanges of expert layers (all-to-alls of tokens) priority over gathers and reductions on the same link.

    expect()    a schedule of `weft.overlap` will soon issue an exchange: gathers and reductions that are issued from
                now on are held back
    let_go()    the exchange is issued: held-back communication starts; messages of one tag start in the order in which
                they were issued

If the host waits for held-back communication, all of it starts immediately. Its order relative to exchanges may then
differ between ranks, which only messages with tags allow. On devices with streams, and with backends without tags,
nothing is held back.
"""

import threading

OF_UNITS = frozenset(("gather", "gathers", "reduce", "reductions", "outer"))
"""The lanes of weights and gradients that `fully_shard` has sharded. Only the communication of these lanes is held
back."""

_gate: threading.Event | None = None


def expect() -> None:
    """Until `let_go`, hold back gathers and reductions. Call this if an exchange of an expert layer follows soon."""
    global _gate
    if _gate is None:
        _gate = threading.Event()


def let_go() -> None:
    """Start the communication that was held back since `expect`. Do nothing without an earlier `expect`."""
    global _gate
    if _gate is not None:
        _gate.set()
        _gate = None


def gate_of(lane: str) -> threading.Event | None:
    """Return the event for which a collective that is issued now on `lane` must wait, or None if it may start."""
    return _gate if lane in OF_UNITS else None
