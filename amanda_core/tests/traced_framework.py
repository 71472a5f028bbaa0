"""A framework that compiles, for tests without a real one: functions are traced, then run.

It knows nothing of Amanda and has the awkward parts of real ones. It looks programs up by a key
before any operator runs. Bodies of branches and loops have caches of their own. It loses what a
host callback raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

__version__ = "2.0"


@dataclass(eq=False)
class Value:
    """A number."""

    data: float


class Parameter(Value):
    """A number that the model keeps."""


@dataclass(eq=False)
class Placeholder:
    """Stands for a number while a function is traced."""

    slot: int
    #: The parameter that it represents, if any.
    known: Value | None = None


@dataclass(frozen=True)
class Op:
    """An operator."""

    name: str
    inputs: tuple[str, ...]
    compute: Callable[..., tuple[float, ...]]


ADD = Op("add", ("x", "y"), lambda x, y: (x + y,))
MUL = Op("mul", ("x", "y"), lambda x, y: (x * y,))
RELU = Op("relu", ("x",), lambda x: (max(x, 0.0),))
SPLIT = Op("split", ("x",), lambda x: (x // 1, x % 1))


def add(x: Any, y: Any) -> Any:
    """Return the sum."""
    return bind(ADD, [x, y])[0]


def mul(x: Any, y: Any) -> Any:
    """Return the product."""
    return bind(MUL, [x, y])[0]


def relu(x: Any) -> Any:
    """Return the larger of `x` and 0."""
    return bind(RELU, [x])[0]


def split(x: Any) -> Any:
    """Return the whole number and the rest, two outputs of one operator."""
    return tuple(bind(SPLIT, [x]))


def bind(op: Op, values: Sequence[Any]) -> list[Any]:
    """Compute an operator, or write it down while a function is traced."""
    if _local.trace is not None:
        return _local.trace.write(lambda *given: _values(op, given), values, len(_values_of(op)))
    return _values(op, values)


def _values(op: Op, values: Sequence[Value]) -> list[Value]:
    return [Value(number) for number in op.compute(*(value.data for value in values))]


@lru_cache
def _values_of(op: Op) -> tuple[float, ...]:
    return op.compute(*(1.0 for _ in op.inputs))


# Tracing.


Function = Callable[..., Sequence[Value]]


@dataclass
class Program:
    """A traced function: what is computed of which slots, one after the other."""

    arguments: int
    instructions: list[tuple[Function, list[int], list[int]]] = field(default_factory=list)
    constants: dict[int, Value] = field(default_factory=dict)
    results: list[int] = field(default_factory=list)

    def execute(self, values: Sequence[Value]) -> list[Value]:
        """Compute the results of some arguments."""
        slots = {**self.constants, **dict(enumerate(values))}
        for function, operands, results in self.instructions:
            found = function(*(slots[slot] for slot in operands))
            slots.update(zip(results, found, strict=True))
        return [slots[slot] for slot in self.results]


class Trace:
    """A program while it is written."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots = program.arguments

    def write(self, function: Function, values: Sequence[Any], results: int) -> list[Any]:
        """Write down a computation, and return placeholders for its results."""
        made = [Placeholder(self.slots + index) for index in range(results)]
        self.slots += results
        slots = [self.slot(value) for value in values]
        self.program.instructions.append((function, slots, [one.slot for one in made]))
        return list(made)

    def slot(self, value: Any) -> int:
        """Return the place of a value, which is a new one for a constant."""
        if isinstance(value, Placeholder):
            return value.slot
        self.program.constants[self.slots] = value
        self.slots += 1
        return self.slots - 1


class _Local(threading.local):
    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.key: Hashable = None


_local = _Local()


def is_tracing() -> bool:
    """Return True while a function is traced in this thread."""
    return _local.trace is not None


def set_cache_key(key: Hashable) -> Hashable:
    """Look compiled programs up under another key in this thread; return the one before."""
    before, _local.key = _local.key, key
    return before


class Compiled:
    """A function that is traced once for each cache key."""

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        self.function = function
        self.programs: dict[Hashable, Program] = {}
        self.traces = 0

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run it; inside another one, write a call of it down."""
        return tuple(_call([self], lambda program, *given: program.execute(given), values))

    def program(self, values: Sequence[Any]) -> Program:
        """Return the program of the present key, tracing it if there is none."""
        key = _local.key
        if key not in self.programs:
            self.programs[key] = self._trace(values)
        return self.programs[key]

    def _trace(self, values: Sequence[Any]) -> Program:
        self.traces += 1
        program = Program(len(values))
        given = [Placeholder(slot, _known(value)) for slot, value in enumerate(values)]
        before, _local.trace = _local.trace, Trace(program)
        try:
            results = self.function(*given)
            program.results = [_local.trace.slot(value) for value in results]
        finally:
            _local.trace = before
        return program


def _known(value: Any) -> Value | None:
    if isinstance(value, Placeholder):
        return value.known
    return value if isinstance(value, Parameter) else None


def _call(
    functions: Sequence[Compiled],
    how: Callable[..., Sequence[Value]],
    values: Sequence[Any],
    arguments: int | None = None,
) -> Sequence[Any]:
    programs = [function.program(values[:arguments]) for function in functions]
    if _local.trace is not None:
        results = len(programs[0].results)
        return _local.trace.write(lambda *given: how(*programs, *given), values, results)
    return run(lambda: how(*programs, *values))


def run(compute: Callable[[], Sequence[Value]]) -> Sequence[Value]:
    """Run compiled programs; every outermost run passes here."""
    return compute()


@lru_cache
def compiled(function: Callable[..., Sequence[Any]]) -> Compiled:
    """Compile a function."""
    return Compiled(function)


def branch(
    flag: Any, yes: Callable[..., Any], no: Callable[..., Any], *values: Any
) -> tuple[Any, ...]:
    """Run one of two functions."""

    def choose(one: Program, other: Program, *given: Value) -> Sequence[Value]:
        return (one if given[-1].data else other).execute(given[:-1])

    return tuple(_call([compiled(yes), compiled(no)], choose, [*values, flag], len(values)))


def repeat(times: int, function: Callable[..., Any], *values: Any) -> tuple[Any, ...]:
    """Run a function several times on the same values, and return the last results."""
    return tuple(
        _call(
            [compiled(function)],
            lambda program, *given: [program.execute(given) for _ in range(times)][-1],
            values,
        )
    )


def mapped(function: Callable[..., Any], copies: int, *values: Any) -> tuple[Any, ...]:
    """Run a function on copies of values, and return the results of the last copy."""
    return repeat(copies, function, *values)


def callback(function: Function, values: Sequence[Any], results: int) -> list[Any]:
    """Call Python code with numbers when the program runs.

    If the code fails, the program continues with zeros.
    """
    assert _local.trace is not None

    def call(*given: Value) -> Sequence[Value]:
        try:
            found = list(function(*given))
            assert len(found) == results
        except BaseException:
            lost.append(function)
            return [Value(0.0)] * results
        return found

    return _local.trace.write(call, values, results)


#: The callbacks that failed.
lost: list[Any] = []


@contextmanager
def cache_key(key: Hashable) -> Iterator[None]:
    """Look compiled programs up under another key inside `with`."""
    before = set_cache_key(key)
    try:
        yield
    finally:
        set_cache_key(before)
