"""Replaced attributes: what is found again, whenever an exception comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from amanda_core.driver_kit import Patch, Patches, made_once, replacing


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


def test_a_function_that_replaces_gets_the_original() -> None:
    @replacing
    def doubled(original: Callable[..., int], number: int, *, twice: bool = False) -> int:
        return original(number) * (4 if twice else 2)

    def increased(number: int) -> int:
        """Add one."""
        return number + 1

    assert doubled(increased) is doubled(increased)
    assert doubled(increased)(3) == 8
    assert doubled(increased)(3, twice=True) == 16
    assert doubled(increased).__doc__ == "Add one."


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


class Found(Patches):
    """Replaces what `find` yields, and counts how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, ...]] = []
        self.numbers: tuple[int, ...] = (5,)

    def install(self) -> None:
        self.replace_found(self.find, *self.numbers)

    def find(self, *numbers: int) -> Iterator[tuple[Any, str, Any]]:
        self.calls.append(numbers)
        yield Owner, "own", (Owner.own, *numbers)
        yield Owner, "inherited", numbers

    def look(self) -> tuple[Any, Any]:
        self.acquire()
        try:
            return Owner.own, Owner.inherited
        finally:
            self.release()


def test_what_was_found_is_replaced_again_while_the_originals_are_the_same() -> None:
    before, patches = dict(vars(Owner)), Found()
    assert patches.look() == patches.look() == ((2, 5), (5,))
    assert patches.calls == [(5,)]
    assert dict(vars(Owner)) == before
    patches.numbers = (5, 6)
    assert patches.look() == ((2, 5, 6), (5, 6))
    assert dict(vars(Owner)) == before


def test_what_others_have_replaced_meanwhile_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patches = Found()
    patches.look()
    monkeypatch.setattr(Owner, "own", 7)
    assert patches.look() == ((7, 5), (5,))
    assert Owner.own == 7
    monkeypatch.undo()
    assert patches.look() == ((2, 5), (5,))
    assert len(patches.calls) == 3


def test_the_originals_of_what_is_replaced_are_known() -> None:
    patches = Found()
    assert list(patches.replaced()) == []
    patches.acquire()
    assert list(patches.replaced()) == [((2, 5), 2)]
    patches.release()
    assert list(patches.replaced()) == []
