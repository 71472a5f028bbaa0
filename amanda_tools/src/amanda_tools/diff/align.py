"""Alignment of two dumps: which operator of one corresponds to which of the other.

Within one framework and mode, ids and names decide if most operators have a counterpart by them.
Otherwise, and across frameworks, the alignment uses what both have: common operator types, module
paths, shapes, and the values themselves, which agree up to the first error.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Literal, TypeVar

from amanda_tools.dump.index import DumpedOp, DumpedTensor
from amanda_tools.kit.operators.entries import REARRANGING, OpFacts, with_parents
from amanda_tools.kit.tensors.statistics import Statistics

__all__ = [
    "Align",
    "Outline",
    "align",
    "alike",
    "by_module",
    "corresponding",
    "frameworks",
    "is_common",
    "is_movement",
    "is_one_framework",
    "is_reshaped",
    "is_uninitialized",
    "ways",
]

Op = TypeVar("Op")
Facts = TypeVar("Facts", bound=OpFacts)

#: How counterparts are found: by ``names``, by ``values``, or by the ``order`` of types.
Align = Literal["auto", "names", "values", "order"]

#: Types that only move or create values. Frameworks do so in different places.
_MOVES = REARRANGING | {
    *("cast", "bitcast", "pad", "assign", "assign_slice", "constant", "full", "empty", "range"),
    *("eye", "meshgrid", "random"),
}
#: One class for types that compute the same thing from other positions.
_SAME = {"linear": "product", "matmul": "product", "grouped_matmul": "product", "outer": "product"}
#: Types that occur in many places, so that an equal type says little.
_COMMON = {
    *("add", "sub", "mul", "div", "neg", "square", "pow", "sqrt", "rsqrt", "mean", "sum", "max"),
    *("maximum", "minimum", "min", "var", "std", "abs", "where", "reciprocal", "exp", "log"),
}
#: Type that another framework may split into several operators -> the last of those.
_SEVERAL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["linear", "conv1d", "conv2d", "conv3d"], ("add",)),
    **dict.fromkeys(["layer_norm", "group_norm", "instance_norm"], ("add", "mul", "batch_norm")),
    "batch_norm": ("add", "sub", "mul"),
    "rms_norm": ("mul",),
    **dict.fromkeys(["gelu", "silu", "mish", "hardswish", "dropout"], ("mul", "where")),
    **dict.fromkeys(["relu", "relu6", "hardtanh"], ("maximum", "minimum", "clip")),
    "softmax": ("div",),
    "log_softmax": ("sub",),
    "attention": ("matmul", "einsum"),
    **dict.fromkeys(["cross_entropy", "mse_loss", "l1_loss"], ("mean", "sum", "neg")),
}
#: Types that write all of their first input, if they work in place.
_WRITES = frozenset({"random", "full", "assign"})
#: What tells operators of one module apart in their names.
_NUMBER = re.compile(r"#\d+$")
_DTYPE = re.compile(r"\w+(?=\[)")
#: Limit on the pairs that are scored. For longer programs only the sequence of types decides.
_MOST = 4_000_000
#: Score for two operators whose values agree.
_AGREE = 8.0


@dataclass(frozen=True)
class Outline:
    """The features of an operator by which its counterpart is found.

    Attributes:
        op: The operator.
        output: Its first output in its first execution.
        figures: Returns the statistics of that output.
    """

    op: DumpedOp
    output: DumpedTensor
    figures: Callable[[], Statistics | None]


def is_one_framework(first: Sequence[DumpedOp], second: Sequence[DumpedOp]) -> bool:
    """Return True if two lists of operators are of the same framework and mode, whatever the
    version.
    """

    def modes(ops: Sequence[DumpedOp]) -> set[tuple[str, str]]:
        parts = (op.namespace.split("/") for op in ops)
        return {(part[0], part[-1]) for part in parts}

    return modes(first) == modes(second)


def frameworks(ops: Sequence[DumpedOp]) -> set[str]:
    """Return the frameworks of operators, whatever the version and mode."""
    return {op.namespace.partition("/")[0] for op in ops}


def is_movement(op: DumpedOp) -> bool:
    """Return True if an operator only moves or creates values, which each framework does
    differently.
    """
    return op.word in _MOVES


def is_common(op: OpFacts) -> bool:
    """Return True for a type that occurs in many places, so that it says little."""
    return op.word in _COMMON


def is_uninitialized(op: DumpedOp, tensor: DumpedTensor) -> bool:
    """Return True if a tensor is memory that nothing has written: the output of an operator that
    makes such memory, or what an operator overwrites as a whole.
    """
    if tensor.what == "output":
        return op.word == "empty"
    overwrites = op.word in _WRITES and op.type.endswith("_")
    return tensor.what == "input" and tensor.position == "0" and overwrites


def alike(one: OpFacts, other: OpFacts) -> bool:
    """Return True if two operators compute the same thing from the same first input."""
    return one.word is not None and _class(one.word) == _class(other.word)


def is_reshaped(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if one shape is that of the other whose neighbouring axes are merged or split.

    >>> is_reshaped([2, 7, 16], [2, 7, 2, 8]), is_reshaped([4, 6], [3, 8])
    (True, False)
    """
    short, long = sorted((set(accumulate(shape, mul)) for shape in (one, other)), key=len)
    return len(one) != len(other) and prod(one) == prod(other) and short <= long


def ways(first: Sequence[DumpedOp], second: Sequence[DumpedOp]) -> Align:
    """Return how the operators of two dumps are aligned if the caller does not say.

    Names decide if at least half of the operators that compute something in one of the dumps have
    the name of one in the other. In two modes of a framework, such as a program and the same one
    compiled, nine of ten must.
    """
    if frameworks(first) != frameworks(second):
        return "values"
    counts = [sum(not is_movement(op) for op in ops) for ops in (first, second)]
    found = sum(not is_movement(first[number]) for number in _by_name(first, second))
    share = 0.5 if is_one_framework(first, second) else 0.9
    return "names" if found >= share * min(counts) else "values"


def align(
    first: Sequence[DumpedOp],
    second: Sequence[DumpedOp],
    outlines: Callable[[], tuple[dict[int, Outline], dict[int, Outline]]],
    way: Align,
) -> dict[int, int]:
    """Map the operators of one dump to their counterparts in another.

    Args:
        first: Operators of the first dump.
        second: Operators of the second dump.
        outlines: Returns the outlines of both dumps by operator number; called only for values.
        way: How they are aligned.

    Returns:
        Number of an operator in the first dump -> number of its counterpart in the second.
    """
    if way == "names":
        return _by_name(first, second)
    if way == "order":
        return dict(_blocks([op.word or op.type for op in ops] for ops in (first, second)))
    ones, others = outlines()
    # In the order of the dump: a graph may run its operators in any order.
    numbers, theirs = (
        sorted(number for number, outline in known.items() if not is_movement(outline.op))
        for known in (ones, others)
    )
    found = _sequences([ones[n] for n in numbers], [others[n] for n in theirs])
    return {numbers[i]: theirs[j] for i, j in found}


def by_module(
    named: Sequence[DumpedOp],
    values: Mapping[int, DumpedTensor],
    ops: Sequence[DumpedOp],
    outputs: Mapping[int, DumpedTensor],
) -> dict[int, int]:
    """Map values with names of operators or of modules to the operators that made them.

    What a module returns is the output of the last operator in it with that shape, or of the last
    one if none has that shape. A module that returns what a module in it returns has no
    counterpart if the inner one has a name.

    Args:
        named: The values' names.
        values: The value of each number of `named`.
        ops: The operators.
        outputs: First output of the operators, by their numbers.
    """
    names: dict[str, int] = {}
    modules: dict[str, list[int]] = {}
    for number in outputs:
        names.setdefault(ops[number].name, number)
        for path in with_parents(ops[number].module)[1:]:
            modules.setdefault(path, []).append(number)
    found: dict[int, int] = {}
    taken: set[int] = set()
    # Modules before those that contain them.
    for number in sorted(values, key=lambda one: -len(named[one].name)):
        name = named[number].name
        inside = modules.get(name, [])
        fitting = [one for one in inside if outputs[one].shape == values[number].shape]
        for other in [names[name]] if name in names else (fitting or inside)[-1:]:
            if other not in taken:
                found[number] = other
                taken.add(other)
    return found


def _by_name(first: Sequence[DumpedOp], second: Sequence[DumpedOp]) -> dict[int, int]:
    # A mode may number operators otherwise, but it gives them no other shapes.
    modes = not is_one_framework(first, second)
    return corresponding(
        first,
        second,
        exact=(lambda op: op.type if modes else (op.id, op.type)),
        shapes=_shapes,
        keeps_shapes=modes,
    )


def _shapes(op: DumpedOp) -> Hashable:
    return tuple(_DTYPE.sub("", tensor or "") for tensor in op.inputs)


def corresponding(
    first: Sequence[Facts],
    second: Sequence[Facts],
    exact: Callable[[Facts], Hashable],
    shapes: Callable[[Facts], Hashable],
    keeps_shapes: bool = False,
) -> dict[int, int]:
    """Map operators of one run to those of another in which most have the same names.

    If not all have, their sequences decide first, so that an operator that one run has and the
    other has not shifts none of those after it, which are numbered.

    Args:
        first: Operators of the first run, in the order of their first execution.
        second: Operators of the second run.
        exact: Returns what operators with equal names must have in common.
        shapes: Returns the shapes of the inputs.
        keeps_shapes: Whether only operators with equal shapes correspond.
    """

    def named(op: Facts) -> Hashable:
        return exact(op), op.name, shapes(op) if keeps_shapes else None

    if Counter(map(named, first)) == Counter(map(named, second)):
        return _lookup(first, second, named)

    def unnumbered(op: Facts) -> Hashable:
        return op.type, _NUMBER.sub("", op.name)

    # Lines tell operators of a module apart, unless the program's text is another.
    lines = [{(op.source, unnumbered(op)) for op in ops} for ops in (first, second)]
    is_one_text = len(lines[0] & lines[1]) > 0.5 * min(map(len, lines))

    def line(op: Facts) -> str | None:
        return op.source if is_one_text else None

    def place(op: Facts) -> Hashable:
        return unnumbered(op), line(op), shapes(op)

    found = dict(_blocks([place(op) for op in ops] for ops in (first, second)))
    return found | _lookup(first, second, lambda op: (named(op), line(op)), found)


def _lookup(
    first: Sequence[Op],
    second: Sequence[Op],
    key: Callable[[Op], Hashable],
    found: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Map operators that have no counterpart to such with an equal key, in their order."""
    found = found or {}
    taken = set(found.values())
    free: dict[Hashable, list[int]] = {}
    for number, op in reversed(list(enumerate(second))):
        if number not in taken:
            free.setdefault(key(op), []).append(number)
    return {
        number: free[key(op)].pop()
        for number, op in enumerate(first)
        if number not in found and free.get(key(op))
    }


def _sequences(ones: Sequence[Outline], others: Sequence[Outline]) -> list[tuple[int, int]]:
    """Return the sequence of pairs, in order, with the highest total score."""
    if len(ones) * len(others) > _MOST:
        return _blocks([o.op.word or o.op.type for o in listed] for listed in (ones, others))
    rows = [[0.0] * (len(others) + 1) for _ in range(len(ones) + 1)]
    scores = [
        [_score(one, other, others[j + 1 : j + 2]) for j, other in enumerate(others)]
        for one in ones
    ]
    for i in range(len(ones) - 1, -1, -1):
        row, below, here = rows[i], rows[i + 1], scores[i]
        for j in range(len(others) - 1, -1, -1):
            best = max(below[j], row[j + 1])
            if here[j] > 0:
                best = max(best, below[j + 1] + here[j])
            row[j] = best
    pairs, i, j = [], 0, 0
    while i < len(ones) and j < len(others):
        # Among equal scores prefer the later operator: the last of several computes the result.
        if rows[i][j] == rows[i][j + 1]:
            j += 1
        elif rows[i][j] == rows[i + 1][j]:
            i += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return _drop_implausible(_repair_pairs(pairs, ones, others), ones, others)


def _blocks(words: Iterable[Sequence[Hashable]]) -> list[tuple[int, int]]:
    """Return the pairs of the longest sequences of types that both have."""
    mine, theirs = words
    blocks = difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
    return [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]


def _repair_pairs(
    pairs: list[tuple[int, int]], ones: Sequence[Outline], others: Sequence[Outline]
) -> list[tuple[int, int]]:
    """Replace pairs whose values disagree by pairs whose values agree, if there are any.

    The two programs may run their branches in another order.
    """
    sure = {i: j for i, j in pairs if _agree(ones[i], others[j])}
    free = set(range(len(others))) - set(sure.values())
    for i, one in enumerate(ones):
        if i in sure or one.op.word in _COMMON:
            continue
        scores = {j: _score(one, others[j], others[j + 1 : j + 2]) for j in free}
        best = max(scores, key=lambda j: scores[j], default=None)
        if best is not None and scores[best] >= _AGREE:
            sure[i] = best
            free.remove(best)
    rest = {i: j for i, j in pairs if i not in sure and j in free}
    return sorted((sure | rest).items())


def _drop_implausible(
    pairs: list[tuple[int, int]], ones: Sequence[Outline], others: Sequence[Outline]
) -> list[tuple[int, int]]:
    """Drop pairs that were matched by type alone and whose values disagree.

    If values had gone wrong at such an operator, the values after it would be wrong as well.
    """
    agree = [_agree(ones[i], others[j]) for i, j in pairs]
    last = max((number for number, agrees in enumerate(agree) if agrees), default=-1)
    return [
        pair
        for number, pair in enumerate(pairs)
        if agree[number] or number > last or ones[pair[0]].op.word not in _COMMON
    ]


def _score(one: Outline, other: Outline, following: Sequence[Outline]) -> float:
    """Return a score for two operators being the same; 0 if they cannot be."""
    shapes = one.output.shape, other.output.shape
    if sorted(shapes[0]) != sorted(shapes[1]) and not is_reshaped(*shapes):
        return 0.0
    word, theirs = one.op.word, other.op.word
    several = theirs in _SEVERAL.get(word or "", ()) or word in _SEVERAL.get(theirs or "", ())
    score = 0.0
    if alike(one.op, other.op):
        score = 2.0 if word in _COMMON else 4.0
        # Another framework may add the bias in an operator of its own.
        if "bias" in _roles(one.op) and "bias" not in _roles(other.op) and following:
            same = following[0].output.shape == other.output.shape
            score = 1.0 if same and following[0].op.word == "add" else score
    elif several:
        score = 2.0
    if score and _agree(one, other):
        score += _AGREE
    return score + _likeness(one.op.module, other.op.module) if score else 0.0


def _class(word: str | None) -> str | None:
    return _SAME.get(word or "", word)


def _roles(op: DumpedOp) -> set[str]:
    """Return the roles of the inputs that are present."""
    return {role for role, value in zip(op.input_roles, op.inputs, strict=False) if value}


def _agree(one: Outline, other: Outline) -> bool:
    """Return True if the statistics are about the same, whatever the order of axes."""
    first, second = one.figures(), other.figures()
    if first is None or second is None or (first.nan, first.inf) != (second.nan, second.inf):
        return False
    pairs = [
        (getattr(first, name), getattr(second, name)) for name in ("min", "max", "mean", "std")
    ]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    largest = max((abs(value) for pair in known for value in pair), default=0.0)
    return all(abs(a - b) <= 1e-3 * largest for a, b in known)


@functools.lru_cache(maxsize=1 << 16)
def _likeness(one: str, other: str) -> float:
    """Return how much two module paths have in common, from 0 to 1."""
    parts = [set(re.findall(r"[a-z]+|\d+", path.lower())) for path in (one, other)]
    together = parts[0] | parts[1]
    return len(parts[0] & parts[1]) / len(together) if together else 0.0
