"""Live buffers: what is alive, when the peak is, and who owns it."""

from __future__ import annotations

from amanda_core.interface.facts import Storage
from amanda_tools.memory.ledger import Ledger


class Thing:
    """An object that a weak reference can refer to."""


def test_the_ledger() -> None:
    ledger = Ledger(lambda when, owner, size: None)
    one, two, view = Thing(), Thing(), Thing()
    assert ledger.meet(Storage("a", 10, one), 1, 0) == 10
    assert ledger.meet(Storage("a", 10, view), 2, 0) == 0
    assert ledger.meet(Storage("b", 7, two), 2, 0) == 7
    assert (ledger.live, ledger.peak, ledger.peak_owner) == (17, 17, 2)
    del one
    ledger.settle()
    assert ledger.live == 17  # The view is left.
    del view
    # What dies is struck out before anything else happens: another has its address.
    other = Thing()
    assert ledger.meet(Storage("a", 5, other), 3, 0) == 5
    assert (ledger.live, ledger.peak) == (12, 17)
    assert ledger.at_peak == {1: 10, 2: 7}
    # A storage that is resized in place, and one that moves.
    assert ledger.meet(Storage("a", 9, other), 4, 0) == 4
    assert ledger.meet(Storage("c", 20, other), 4, 0) == 20
    assert ledger.live == 27
    assert ledger.by_owner[3] == 0
    assert ledger.at_peak == {2: 7, 4: 20}
    given = Thing()
    assert ledger.meet(Storage("d", 3, given), None, 0) == 3
    assert (ledger.given, ledger.live) == (3, 27)
    del given, other, two
    ledger.settle()
    assert (ledger.given, ledger.given_peak, ledger.live) == (0, 3, 0)
