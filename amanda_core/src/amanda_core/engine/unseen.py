"""Operators that a program ran and a tool did not see, and the sentences of results about them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from amanda_core.engine.store import Store

__all__ = ["Unseen", "saying_what_was_not_seen"]

F = TypeVar("F", bound=Callable[..., Any])

#: How many operators or threads a line names.
_NAMED = 4


class Unseen:
    """The operators, threads and weights that one tool did not see.

    Attributes:
        weights: Parameter, as "root:name" -> its shape, and why a read of it was not shown.
    """

    def __init__(self) -> None:
        #: Why -> name of an operator -> how many calls of it.
        self._calls: dict[str, dict[str, int]] = {}
        #: Thread -> its first operator, and why tools could not be applied to it.
        self._threads: dict[str, str] = {}
        #: Operator that contains others -> why those are not shown.
        self._inside: dict[str, str] = {}
        #: Selection of the tool -> whether it chose an operator.
        self._chose: dict[str, bool] = {}
        self.weights: dict[str, tuple[tuple[int, ...], str]] = {}
        #: How many processes the program has forked.
        self.forks = 0
        #: How many Python programs it has started without tools.
        self.started = 0

    def add_call(self, op: str, why: str, weights: Mapping[str, tuple[int, ...]]) -> None:
        """Add a call of an operator, and the shapes of the parameters that it read."""
        calls = self._calls.setdefault(why, {})
        calls[op] = calls.get(op, 0) + 1
        self.weights.update({name: (shape, f"read {why}") for name, shape in weights.items()})

    def add_thread(self, thread: str, op: str, why: str) -> None:
        """Add a thread by the first operator that it ran."""
        self._threads.setdefault(thread, f"first {op}{why}")

    def add_choice(self, selection: str, chosen: bool) -> None:
        """Add whether a selection of the tool chose an operator."""
        self._chose[selection] = self._chose.get(selection, False) or chosen

    def add_inside(self, op: str, why: str) -> None:
        """Add an operator of which the parts are not shown."""
        self._inside[op] = why

    def lines(self, stores: Iterable[Store]) -> Iterator[str]:
        """Yield a sentence without a full stop for each kind of thing that was not shown.

        Args:
            stores: Those that know which operators were shown.
        """
        places = (context._place for store in stores for context in tuple(store.contexts.values()))
        shown = len({place for place in places if place[1] is False})
        for why, calls in self._calls.items():
            names = [f"{op} ({n} call{'s' * (n != 1)})" for op, n in calls.items()]
            total = shown + len(calls)
            some = f"{len(calls)} of {total} operator{'s' * (total != 1)}"
            yield f"{some} not seen {why}: {_some(names)}"
        for selection, chose in self._chose.items():
            if not chose:
                yield (
                    f"{selection} chose nothing that ran: no operator has such a name or module, "
                    "or its module was not called, or a fused operator computes it"
                )
        if self._threads:
            names = [f"{name} ({first})" for name, first in self._threads.items()]
            yield f"operators not seen of {_some(names)}"
        if self.forks:
            processes = "a process" if self.forks == 1 else f"{self.forks} processes"
            yield f"{processes} that the program forked ran without tools"
        if self.started:
            processes = "a process" if self.started == 1 else f"{self.started} processes"
            yield (
                f"{processes} that the program started got no tools from here: `amanda run` gives "
                "them to all"
            )
        if self._inside:
            names = [f"{op} ({why})" for op, why in self._inside.items()]
            yield f"operators not seen inside {_some(names)}"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + f" and {more} more" * (more > 0)


def saying_what_was_not_seen(result: F) -> F:
    """Let a tool's `result` add what the tool was not shown to the notes of what it returns."""

    @functools.wraps(result)
    def with_notes(tool: Any, *args: Any, **kwargs: Any) -> Any:
        found = result(tool, *args, **kwargs)
        notes = getattr(found, "notes", None)
        if isinstance(notes, list):
            notes += [line for line in tool.not_seen() if line not in notes]
        return found

    return with_notes  # type: ignore[return-value]
