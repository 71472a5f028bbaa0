"""Functions of the framework `toy` that are compiled: traced once, then run as programs.

It knows nothing of Amanda and has the awkward parts of real compilers. It looks programs up by a
key before any operator runs. Bodies of branches and loops have caches of their own. It loses what a
host callback raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from amanda_core.testing.toy import framework as toy

Function = Callable[..., Sequence[Any]]


@dataclass(eq=False)
class Placeholder:
    """Stands for a number while a function is traced."""

    slot: int
    #: The parameter that it represents, if any.
    known: toy.Value | None = None


@dataclass
class Program:
    """A traced function: what is computed of which slots, one after the other.

    Attributes:
        slots: How many slots there are; the arguments come first.
    """

    slots: int
    instructions: list[tuple[Function, list[int], list[int]]] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    results: list[int] = field(default_factory=list)

    def execute(self, values: Sequence[Any]) -> list[Any]:
        """Compute the results of some arguments."""
        slots = {**self.constants, **dict(enumerate(values))}
        for function, operands, results in self.instructions:
            found = function(*(slots[slot] for slot in operands))
            slots.update(zip(results, found, strict=True))
        return [slots[slot] for slot in self.results]

    def write(self, function: Function, values: Sequence[Any], results: int) -> list[Any]:
        """Write down a computation, and return placeholders for its results."""
        operands = [self.slot(value) for value in values]
        made = [Placeholder(self._new_slot()) for _ in range(results)]
        self.instructions.append((function, operands, [one.slot for one in made]))
        return list(made)

    def write_operator(self, op: toy.Op, values: list[Any]) -> tuple[Any, ...]:
        """Write down an operator."""
        return tuple(self.write(lambda *now: toy.execute(op, list(now)), values, outputs_of(op)))

    def slot(self, value: Any) -> int:
        """Return the place of a value, which is a new one for a constant."""
        if isinstance(value, Placeholder):
            return value.slot
        slot = self._new_slot()
        self.constants[slot] = value
        return slot

    def _new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1


@lru_cache
def outputs_of(op: toy.Op) -> int:
    """Return how many outputs an operator has."""
    return len(op.compute(*(1.0 for _ in op.inputs)))


class _Local(threading.local):
    def __init__(self) -> None:
        self.program: Program | None = None
        self.key: Hashable = None


_local = _Local()


@contextmanager
def cache_key(key: Hashable) -> Iterator[None]:
    """Look compiled programs up under another key inside `with`."""
    before = set_cache_key(key)
    try:
        yield
    finally:
        set_cache_key(before)


def set_cache_key(key: Hashable) -> Hashable:
    """Look compiled programs up under another key in this thread; return the one before."""
    before, _local.key = _local.key, key
    return before


class Compiled:
    """A function that is traced once for each cache key."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.programs: dict[Hashable, Program] = {}
        self.traces = 0

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run it; inside another one, write a call of it down."""
        return _call([self], lambda program, *given: program.execute(given), values)

    def program(self, values: Sequence[Any]) -> Program:
        """Return the program of the present key, tracing it if there is none."""
        key = _local.key
        if key not in self.programs:
            self.programs[key] = self._trace(values)
        return self.programs[key]

    def _trace(self, values: Sequence[Any]) -> Program:
        self.traces += 1
        program = Program(len(values))
        given = [Placeholder(slot, known(value)) for slot, value in enumerate(values)]
        before, _local.program = _local.program, program
        try:
            with toy.tracing(program.write_operator):
                program.results = [program.slot(value) for value in self.function(*given)]
        finally:
            _local.program = before
        return program


def known(value: Any) -> toy.Value | None:
    """Return the parameter that a value is or represents, or None."""
    if isinstance(value, Placeholder):
        return value.known
    return value if value.is_parameter else None


def _call(
    functions: Sequence[Compiled],
    how: Function,
    values: Sequence[Any],
    arguments: int | None = None,
) -> tuple[Any, ...]:
    programs = [function.program(values[:arguments]) for function in functions]
    if _local.program is None:
        return tuple(run(lambda: how(*programs, *values)))
    results = len(programs[0].results)
    return tuple(_local.program.write(lambda *given: how(*programs, *given), values, results))


def run(compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Run compiled programs; every outermost run passes here."""
    return compute()


#: Compiles a function.
compiled = lru_cache(Compiled)


def branch(flag: Any, yes: Function, no: Function, *values: Any) -> tuple[Any, ...]:
    """Run one of two functions."""

    def choose(one: Program, other: Program, *given: Any) -> Sequence[Any]:
        return (one if given[-1].data else other).execute(given[:-1])

    return _call([compiled(yes), compiled(no)], choose, [*values, flag], len(values))


def repeat(times: int, function: Function, *values: Any) -> tuple[Any, ...]:
    """Run a function several times on the same values, and return the last results."""

    def run_each(program: Program, *given: Any) -> Sequence[Any]:
        return [program.execute(given) for _ in range(times)][-1]

    return _call([compiled(function)], run_each, values)


def callback(function: Function, values: Sequence[Any], results: int) -> list[Any]:
    """Call Python code with numbers when the program runs.

    If the code fails, the program continues with zeros.
    """
    assert _local.program is not None

    def call(*given: Any) -> Sequence[Any]:
        try:
            found = list(function(*given))
            assert len(found) == results
        except Exception:
            lost.append(function)
            return [toy.Value(0.0)] * results
        return found

    return _local.program.write(call, values, results)


#: The callbacks that failed.
lost: list[Any] = []
