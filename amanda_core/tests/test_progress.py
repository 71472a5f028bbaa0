"""What `amanda run` says of a program while it lasts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import amanda
from amanda_core.cli.progress import Progress

from . import toy

pytestmark = pytest.mark.usefixtures("driver")


def test_steps_are_told_now_and_then() -> None:
    said: list[str] = []
    times: Iterator[float] = iter([0.0, 4.0, 11.0, 12.0, 20.0, 21.5])
    with amanda.apply(Progress(said.append, interval=10, clock=lambda: next(times))):
        for _ in range(5):
            toy.relu(toy.Value(1.0))
            amanda.step()
    assert said == ["2 steps in 11 s", "5 steps in 22 s"]


def test_a_slow_first_step() -> None:
    said: list[str] = []
    times: Iterator[float] = iter([0.0, 14.0])
    with amanda.apply(Progress(said.append, interval=10, clock=lambda: next(times))):
        amanda.step()
    assert said == ["1 step in 14 s"]


def test_a_short_program_is_told_nothing_of() -> None:
    said: list[str] = []
    with amanda.apply(Progress(said.append)):
        amanda.step()
    assert said == []
