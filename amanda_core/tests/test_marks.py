"""Marks: routines that only record when they were called."""

from __future__ import annotations

import threading
from array import array

import pytest

from amanda_core.driver_kit import marks as module
from amanda_core.driver_kit.marks import Marks


def test_marks_are_taken_once_and_in_order() -> None:
    times = iter([5, 9])
    marks = Marks(lambda: None, lambda: next(times))
    marks.note(number=1)
    marks.note("a value", number=2)
    here = threading.get_ident()
    assert list(marks.take()) == [(1, 5, here), (2, 9, here)]
    assert list(marks.take()) == []


def test_what_drivers_record_is_merged_by_time() -> None:
    marks = Marks(lambda: None, lambda: 5)
    recorded = [array("q", [7, 4, 1, 8, 6, 1]).tobytes(), b""]
    source = marks.source("mine", lambda: lambda: recorded.pop(0))
    assert marks.source("mine", lambda: pytest.fail("made again")) is source
    marks.note(number=2)
    assert [number for number, _, _ in marks.take()] == [7, 2, 8]
    assert list(marks.take()) == []


def test_many_marks_are_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 10)
    taken: list[int] = []
    marks = Marks(lambda: taken.extend(number for number, _, _ in marks.take()))
    for number in range(25):
        marks.note(number=number)
    assert taken == list(range(20))


def test_which_routines_are_marks() -> None:
    marks = Marks(lambda: None)
    assert Marks.of(marks.note) is marks
    assert Marks.of(marks.take) is None
    assert Marks.of(print) is None
