"""Lists of results, and functions of a part of the values. Drivers test the backward program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from amanda_core.driver_kit.execution import at, several


@pytest.mark.parametrize(
    ("result", "listed"), [(1, [1]), ([1, 2], [1, 2]), ((), []), (((1,), 2), [(1,), 2])]
)
def test_a_result_is_a_list(result: Any, listed: list[Any]) -> None:
    assert several(result) == listed


def test_a_list_is_copied() -> None:
    result = [1]
    assert several(result) is not result


def test_a_function_of_a_part_of_the_values() -> None:
    seen = []

    def run(values: list[Any]) -> Sequence[Any]:
        seen.append(values)
        return [value and value * 10 for value in values]

    assert at([3, 1], 4, run)([5, 7]) == [50, 70]
    assert seen == [[None, 7, None, 5]]


def test_values_that_lack_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        at([0, 1], 2, list)([1])
