"""Random programs: ops on few values, in functions, loops, branches and gradients of one another.

A program is drawn from a seed as a tree of lines, of which only those that lead to the result are
kept. All values are matrices of one shape, so that any line can read any value in its scope.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from .reference_programs import Ops

__all__ = ["Drawn"]

#: First letter of an op's name -> its type.
UNARY = {"t": "Tanh", "g": "Sigmoid", "f": "Softplus", "i": "Identity", "n": "Neg"}
BINARY = {"p": "Mul", "a": "AddV2", "d": "Sub", "m": "MatMul", "x": "Maximum"}
#: Of which one operand is broadcast.
BROADCAST = {"b": "Mul", "c": "AddV2"}

#: Kind of line -> how often it is drawn.
OF_ONE_OP = {"one": 6, "two": 9, "twice": 3, "broadcast": 2, "stopped": 1, "rows": 1, "parts": 1}
#: Likewise kinds with nested blocks, which are not drawn once the tree is deep.
NESTED = {
    "call": 4,
    "call twice": 2,
    "loop": 3,
    "branch": 3,
    "switch": 1,
    "map": 1,
    "recomputed": 1,
    "custom gradient": 1,
    "gradient": 1,
}
#: What differentiates with respect to its arguments only, and so may not read anything else.
CLOSED = ("recomputed", "custom gradient")

#: A value's number -> the tensor.
Scope = dict[int, Any]


@dataclass
class Line:
    """One operation on values; `made` are the numbers of its results."""

    kind: str
    read: list[int]
    made: list[int]
    name: str = ""
    times: int = 0
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Block:
    """Lines that read the arguments, one another's results and, mostly, values from outside."""

    arguments: list[int]
    lines: list[Line]
    results: list[int]

    def walk(self) -> Iterator[Line]:
        """Return all lines, including those of nested blocks."""
        for line in self.lines:
            yield line
            for block in line.blocks:
                yield from block.walk()


class Drawn:
    """A random program of three matrices that returns a number.

    Args:
        seed: The random seed.
        size: The maximum number of lines of the outermost block.
        depth: How deeply blocks are nested.
        without: Kinds of lines that are not drawn.

    Attributes:
        names: The names of its ops.
    """

    def __init__(
        self, seed: object, size: int = 7, depth: int = 3, without: Sequence[str] = ()
    ) -> None:
        self._chance = random.Random(f"program {seed}")
        self._values = self._ops = 0
        self._without = without
        self._root = self._block([], 3, size, depth, 1)
        self.names = [line.name for line in self._root.walk() if line.name]
        self.kinds = {line.kind for line in self._root.walk()}
        self.__name__ = f"drawn_{seed}"

    def __call__(self, o: Ops, x: Any, w: Any, v: Any) -> Any:
        """Run it."""
        (result,) = _function(o, self._root, {})(x, w, v)
        return tf.reduce_sum(result * x)  # So that there is a gradient.

    def __str__(self) -> str:
        return "\n".join(_shown(self._root))

    def _numbers(self, count: int) -> list[int]:
        self._values += count
        return [*range(self._values - count, self._values)]

    def _block(
        self, seen: Sequence[int], arguments: int, size: int, depth: int, results: int
    ) -> Block:
        given = self._numbers(arguments)
        seen = [*seen, *given]
        lines: list[Line] = []
        for _ in range(self._chance.randint(max(2, size // 2), size)):
            lines.append(self._line(seen, depth))
            seen += lines[-1].made
        returned = [lines[-1].made[0], *self._chance.sample(seen, results - 1)]
        # Only what leads to a result.
        wanted = set(returned)
        kept: list[Line] = []
        for line in reversed(lines):
            if wanted.intersection(line.made):
                kept.insert(0, line)
                wanted.update(_read(line))
        return Block(given, kept, returned)

    def _line(self, seen: Sequence[int], depth: int) -> Line:
        kinds = {**OF_ONE_OP, **(NESTED if depth else {})}
        kinds = {kind: weight for kind, weight in kinds.items() if kind not in self._without}
        (kind,) = self._chance.choices(list(kinds), list(kinds.values()))
        # Rather later values than earlier ones, so that programs are deep.
        places = [max(self._chance.choices(range(len(seen)), k=2)) for _ in range(2)]
        read = [seen[place] for place in places]
        if kind in OF_ONE_OP:
            letters = {"two": BINARY, "twice": BINARY, "broadcast": BROADCAST}.get(kind, UNARY)
            self._ops += 1
            name = f"{self._chance.choice(list(letters))}{self._ops}"
            if kind == "twice":
                read = [read[0], read[0]]
            return Line(kind, read if letters is not UNARY else read[:1], self._numbers(1), name)
        self._ops += 1
        line = Line(kind, read, [], f"t{self._ops}", self._chance.randint(1, 3))
        arguments = {"call": 2, "call twice": 2, "loop": 2, "branch": 0, "switch": 0}.get(kind, 1)
        results = {"loop": 2, "call": self._chance.randint(1, 2)}.get(kind, 1)
        line.read = read[: max(arguments, 1)]
        for _ in range({"branch": 2, "switch": 3}.get(kind, 1)):
            size = self._chance.randint(2, 4)
            outside = () if kind in CLOSED else seen
            line.blocks.append(self._block(outside, arguments, size, depth - 1, results))
        line.made = self._numbers(results)
        return line


def _read(line: Line) -> set[int]:
    inside = [number for block in line.blocks for inner in block.walk() for number in inner.read]
    return {*line.read, *inside, *(number for block in line.blocks for number in block.results)}


def _function(o: Ops, block: Block, outside: Scope) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        scope = {**outside, **dict(zip(block.arguments, values, strict=True))}
        for line in block.lines:
            made = _ONE_OP[line.kind] if line.kind in _ONE_OP else _BLOCKS[line.kind]
            results = made(o, line, scope)
            scope.update(zip(line.made, results, strict=True))
        return [scope[number] for number in block.results]

    return run


# What lines of one op do, besides that op.


def _op(o: Ops, line: Line, *values: Any) -> Any:
    return o({**UNARY, **BINARY, **BROADCAST}[line.name[0]], line.name, *values)


def _plain(o: Ops, line: Line, scope: Scope) -> Values:
    return [_op(o, line, *(scope[number] for number in line.read))]


def _broadcast(o: Ops, line: Line, scope: Scope) -> Values:
    matrix, other = (scope[number] for number in line.read)
    return [_op(o, line, matrix, other[0])]


def _stopped(o: Ops, line: Line, scope: Scope) -> Values:
    return [tf.stop_gradient(value) for value in _plain(o, line, scope)]


def _rows(o: Ops, line: Line, scope: Scope) -> Values:
    # A gradient of slices, which the gradient of the transposition makes dense.
    return [tf.gather(tf.transpose(value), [0, 2, 2]) for value in _plain(o, line, scope)]


def _parts(o: Ops, line: Line, scope: Scope) -> Values:
    first, second, third = tf.split(_plain(o, line, scope)[0], 3)
    return [tf.concat([third, first * 2, second], 0)]


Values = list[Any]
_ONE_OP: dict[str, Callable[[Ops, Line, Scope], Values]] = {
    "one": _plain,
    "two": _plain,
    "twice": _plain,
    "broadcast": _broadcast,
    "stopped": _stopped,
    "rows": _rows,
    "parts": _parts,
}


# What lines with blocks inside do. Their results are kept small, by the line's own op.


def _small(values: Sequence[Any]) -> Values:
    return [tf.tanh(value * 0.3) for value in values]


def _last(o: Ops, line: Line, values: Sequence[Any]) -> Values:
    # Directly after the inner block, with no op between it and the block's gradient.
    return [o("Tanh", line.name, values[0]), *_small(values[1:])]


def _call(o: Ops, line: Line, scope: Scope) -> Values:
    function = _function(o, line.blocks[0], scope)
    return _last(o, line, o.call(function, *(scope[number] for number in line.read)))


def _call_twice(o: Ops, line: Line, scope: Scope) -> Values:
    function = _function(o, line.blocks[0], scope)
    first, second = (scope[number] for number in line.read)
    (again,) = _small(o.call(function, first, second))
    return _last(o, line, o.call(function, second, again))


def _loop(o: Ops, line: Line, scope: Scope) -> Values:
    function = _function(o, line.blocks[0], scope)

    def body(*state: Any) -> Values:
        return _small(function(*state))

    results = o.loop(line.times, body, *(scope[number] for number in line.read))
    return _last(o, line, results)


def _branch(o: Ops, line: Line, scope: Scope) -> Values:
    then, other = (_function(o, block, scope) for block in line.blocks)
    above = tf.reduce_sum(scope[line.read[0]]) > line.times - 2
    return _last(o, line, [o.choose(above, lambda: then()[0], lambda: other()[0])])


def _switch(o: Ops, line: Line, scope: Scope) -> Values:
    functions = [_function(o, block, scope) for block in line.blocks]
    index = tf.cast(tf.reduce_sum(scope[line.read[0]]) * 5, tf.int32) % 3
    if o.is_reference:
        return _last(o, line, functions[int(index)]())
    return _last(o, line, tf.switch_case(index, functions))


def _map(o: Ops, line: Line, scope: Scope) -> Values:
    function = _function(o, line.blocks[0], scope)
    rows = scope[line.read[0]]

    def of_row(row: Any) -> Any:
        (result,) = function(row + tf.zeros_like(rows))
        return tf.reduce_mean(result, 0)

    mapped = tf.stack([of_row(row) for row in rows]) if o.is_reference else tf.map_fn(of_row, rows)
    return _last(o, line, [mapped])


def _recomputed(o: Ops, line: Line, scope: Scope) -> Values:
    function = _function(o, line.blocks[0], scope)
    again = tf.recompute_grad(lambda value: function(value)[0])
    return _last(o, line, [again(scope[line.read[0]])])


def _custom(o: Ops, line: Line, scope: Scope) -> Values:
    function = _function(o, line.blocks[0], scope)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(value: Any) -> Any:
        (result,) = function(value)
        return result, lambda gradient: gradient * tf.sin(result) * value

    return _last(o, line, [run(scope[line.read[0]])])


def _gradient(o: Ops, line: Line, scope: Scope) -> Values:
    function = _function(o, line.blocks[0], scope)
    value = tf.identity(scope[line.read[0]])
    with tf.GradientTape() as tape:
        tape.watch(value)
        (result,) = function(value)
    return _last(o, line, [tape.gradient(result, value, unconnected_gradients="zero")])


_BLOCKS: dict[str, Callable[[Ops, Line, Scope], Values]] = {
    "call": _call,
    "call twice": _call_twice,
    "loop": _loop,
    "branch": _branch,
    "switch": _switch,
    "map": _map,
    "recomputed": _recomputed,
    "custom gradient": _custom,
    "gradient": _gradient,
}


def _shown(block: Block) -> Iterator[str]:
    yield f"of {block.arguments}"
    for line in block.lines:
        times = f" x{line.times}" if line.times else ""
        yield f"  {line.made} = {line.name or line.kind}{times} {line.read} ({line.kind})"
        for inner in line.blocks:
            yield from (f"    {text}" for text in _shown(inner))
    yield f"returns {block.results}"
