"""The ledger of buffers against sums over those that are alive."""

from __future__ import annotations

from hypothesis import given, strategies as st

from amanda_core.interface.facts import Storage
from amanda_tools.memory.ledger import Ledger


class Held:
    """What holds a buffer."""


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from("ab"))))
def test_who_has_what_at_the_peak(changes: list[tuple[int, int, str]]) -> None:
    ledger = Ledger(lambda *_: None)
    held: dict[int, Held] = {}
    known: dict[int, tuple[int, int, str]] = {}
    peak, owners, kinds = 0, dict[int | None, int](), dict[str, int]()
    for number, (buffer, owner, kind) in enumerate(changes):
        if known.pop(buffer, None):
            del held[buffer]
            ledger.settle()
            continue
        held[buffer], known[buffer] = Held(), (number + 1, owner, kind)
        ledger.meet(Storage(number, number + 1, held[buffer]), owner, number, kind)
        if (now := sum(size for size, *_ in known.values())) > peak:
            peak, owners, kinds = now, {}, {}
            for size, whose, what in known.values():
                owners[whose] = owners.get(whose, 0) + size
                kinds[what] = kinds.get(what, 0) + size
    assert (ledger.peak, ledger.at_peak, ledger.kinds_at_peak) == (peak, owners, kinds)


def test_buffers_that_existed_before_were_there_at_the_peak() -> None:
    ledger = Ledger(lambda *_: None)
    first, before = Held(), Held()
    ledger.meet(Storage("output", 10, first), 1, 0, "activations")
    ledger.meet(Storage("weight", 3, before), None, 1)
    ledger.meet(Storage("weight", 3, before), None, 2, "weights")
    assert ledger.at_peak == {1: 10, None: 3}
    assert ledger.kinds_at_peak == {"activations": 10, "weights": 3}
    del before
    ledger.settle()
    assert ledger.at_peak == {1: 10, None: 3}
    assert (ledger.live, ledger.given) == (10, 0)
