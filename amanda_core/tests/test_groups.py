"""Processes that decide together: the same of all, or an error in each."""

from __future__ import annotations

from typing import Any

import pytest

from amanda_core.errors import UnsupportedError
from amanda_core.interface.groups import Group, How


class Array:
    """As much of an array as the agreement reads."""

    def __init__(self, *values: float) -> None:
        self.values, self.shape, self.dtype = values, (len(values),), "float32"


class Two(Group):
    """This process and another one, whose texts and arrays are given."""

    size = 2

    def __init__(self, other: str | None, *arrays: Array) -> None:
        self.other, self.arrays = other, list(arrays)

    def exchange(self, text: str) -> list[str]:
        return [text, text if self.other is None else self.other]

    def reduce(self, values: Any, how: How) -> Array:
        combine: Any = {"sum": sum, "max": max, "min": min}[how]
        pairs = zip(values.values, self.arrays.pop(0).values, strict=True)
        return Array(*(combine(pair) for pair in pairs))


def test_one_process_has_its_own_values() -> None:
    values = {"a": Array(1, 2)}
    assert Group().agree("masks", values) == values


@pytest.mark.parametrize(("how", "expected"), [("sum", (4, 3)), ("max", (3, 2)), ("min", (1, 1))])
def test_arrays_are_combined(how: How, expected: tuple[int, ...]) -> None:
    found = Two(None, Array(3, 1)).agree("masks", {"a": Array(1, 2)}, how)
    assert found["a"].values == expected


def test_processes_that_are_elsewhere_send_nothing() -> None:
    group = Two("masks of step 2")
    with pytest.raises(UnsupportedError, match="process 1: masks of step 2"):
        group.agree("masks of step 1", {"a": Array(1)})
