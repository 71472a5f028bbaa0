"""`call_offset`: one offset for one place in a program, whatever bytecode the interpreter runs."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from amanda_core.identity.identity import call_offset, call_offsets


class Noting:
    """Records the position of the frame that calls it."""

    def __init__(self) -> None:
        self.raw: set[int] = set()
        self.offsets: set[int] = set()

    def note(self, depth: int = 2) -> int:
        frame = sys._getframe(depth)
        self.raw.add(frame.f_lasti)
        offset = call_offset(frame.f_code.co_code, frame.f_lasti)
        assert offset == call_offsets(frame.f_code)[frame.f_lasti >> 1]
        self.offsets.add(offset)
        return 0

    def __getitem__(self, key: object) -> int:
        return self.note()

    def __add__(self, other: object) -> int:
        return self.note()

    def __call__(self) -> int:
        return self.note()

    @property
    def value(self) -> int:
        return self.note()

    def values(self) -> Iterator[int]:
        yield self.note()

    def __radd__(self, other: object) -> int:
        return self.note()


def item(noting: Noting) -> Any:
    return noting[0]


def attribute(noting: Noting) -> Any:
    return noting.value


def generator(noting: Noting) -> Any:
    for _ in noting.values():
        break


def addition(noting: Noting) -> Any:
    return noting + 1


def call(noting: Noting) -> Any:
    return noting()


def builtin(noting: Noting) -> Any:
    return sum((noting,))


def keywords(noting: Noting) -> Any:
    return noting.note(depth=1)


@pytest.mark.parametrize("program", [item, attribute, generator, addition, call, builtin, keywords])
def test_a_place_keeps_its_offset_when_code_is_warm(program: Callable[[Noting], Any]) -> None:
    noting = Noting()
    for _ in range(3000):
        program(noting)
    assert len(noting.offsets) == 1


def test_two_places_have_two_offsets() -> None:
    noting = Noting()
    for _ in range(100):
        noting[0], noting[1]
        operator.add(noting, 1)
        sum((noting,))
    assert len(noting.offsets) == 4


@pytest.mark.untraced
@pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12)), reason="other versions do not do this"
)
def test_the_interpreter_tells_one_place_as_two() -> None:
    # In a process of its own: CPython specialises only so many functions of one.
    code = f"import runpy; print(*runpy.run_path({__file__!r})['raw_of_an_item']())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 2


def raw_of_an_item() -> set[int]:
    noting = Noting()
    for _ in range(100):
        noting[0]
    return noting.raw
