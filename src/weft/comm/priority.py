"""What goes first where lanes share a link: an exchange that is about to leave, before gathers and reductions.

    expect()    a schedule: an exchange leaves within moments. Gathers and reductions that are issued now are held back
    let_go()    the exchange has left: what was held back begins, in the order of its issue

What is waited for begins at once, and with it all that was held back: the order of exchanges and the rest differs then
from that of other ranks, which tags allow. Streams and backends without tags hold nothing back: there ranks issue all
communication of a group in one order.
"""

import threading

YIELDING = frozenset(("gather", "gathers", "reduce", "reductions", "outer"))
"""The lanes that are held back."""

_gate: threading.Event | None = None


def expect() -> None:
    """Hold back what is issued on lanes that yield, until `let_go`."""
    global _gate
    if _gate is None:
        _gate = threading.Event()


def let_go() -> None:
    """Let begin what was held back; without effect if nothing is expected."""
    global _gate
    if _gate is not None:
        _gate.set()
        _gate = None


def gate_of(lane: str) -> threading.Event | None:
    """What a collective issued now on `lane` has to wait for, None for nothing."""
    return _gate if lane in YIELDING else None
