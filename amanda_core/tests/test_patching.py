"""Replaced attributes: what is found again, whenever an exception comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amanda_core.driver_kit import Patch, Patches, made_once


class Base:
    inherited = 1


class Owner(Base):
    own = 2


@pytest.mark.parametrize("name", ["own", "inherited", "missing"])
@pytest.mark.parametrize("replacement", [None, 3])
def test_an_attribute_is_as_before(name: str, replacement: int | None) -> None:
    before = dict(vars(Owner))
    patch = Patch(Owner, name, replacement)
    assert getattr(Owner, name) is replacement
    patch.undo()
    assert dict(vars(Owner)) == before
    patch.undo()
    assert dict(vars(Owner)) == before


@pytest.mark.parametrize("replacement", [None, 3])
def test_undoing_before_the_attribute_is_set(replacement: int | None) -> None:
    before = dict(vars(Owner))

    def fails(undo: Callable[[], None]) -> None:
        undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Patch(Owner, "missing", replacement, fails)
    assert dict(vars(Owner)) == before


def test_a_replacement_is_made_once_for_each_original() -> None:
    made: list[Any] = []

    @made_once
    def wrap(original: Any, word: str = "") -> object:
        made.append((original, word))
        return object()

    first, second = [1], [1]  # They have no hash.
    assert wrap(first) is wrap(first)
    assert wrap(first) is not wrap(second)
    assert wrap(first, "word") is not wrap(first)
    assert made == [(first, ""), (second, ""), (first, "word")]
    for number in range(300):
        wrap([number])
    assert wrap(first) is wrap(first)


def test_replacements_end_with_their_last_user() -> None:
    class Both(Patches):
        def install(self) -> None:
            self.replace(Owner, "own", 5)

    before, patches = dict(vars(Owner)), Both()
    patches.acquire("one")
    patches.acquire("two")
    patches.release("one")
    assert Owner.own == 5
    patches.release("two")
    assert dict(vars(Owner)) == before
