"""Comparison of two dumps: find the first operator at which they differ.

`align` decides which operators correspond, and `numbers` measures how far tensors are apart.
`amanda diff` is the command-line interface.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from amanda_core.errors import ResultError
from amanda_tools.diff.align import (
    Align,
    Outline,
    align as align_ops,
    alike,
    by_module,
    frameworks,
    is_movement,
    is_one_framework,
    is_uninitialized,
    ways,
)
from amanda_tools.diff.compared import Compared
from amanda_tools.diff.created import judge, precisions
from amanda_tools.diff.numbers import Difference, Tolerance, compare_statistics, compare_tensors
from amanda_tools.diff.parting import Parting
from amanda_tools.diff.readers import read_record
from amanda_tools.diff.result import DiffResult
from amanda_tools.diff.spread import spread_of
from amanda_tools.diff.tensor_files import FRAMEWORK, TABLES, TensorFiles
from amanda_tools.dump.files import Dumped
from amanda_tools.dump.index import DumpedOp, DumpedTensor
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.tensors.statistics import Statistics, statistics_of
from amanda_tools.kit.tensors.values import need_numpy

__all__ = ["DiffResult", "compare"]


def compare(
    a: Path | str | Dumped,
    b: Path | str | Dumped,
    rtol: float | None = None,
    atol: float | None = None,
    align: Align = "auto",
) -> DiffResult:
    """Compare two dumps.

    Args:
        a: The first dump, or its path; or what another program recorded, such as a folder of
            ``.npy`` files.
        b: The second, likewise.
        rtol: Relative tolerance. By default 0 for two runs of one release of a framework, and
            otherwise that of PyTorch's tests for the coarser of the two dtypes. Two runs of
            different precision are judged by the error that each operator makes instead, if the
            dumps have what it read.
        atol: Absolute tolerance, with the same default.
        align: Which operators correspond: those with the same ``names``, those whose ``values``
            agree up to the first error, or those at the same place in the ``order`` of types. By
            default names, if most of both dumps have them in common, and else values.

    Raises:
        ResultError: A dump cannot be read, or the dumps have no tensor in common.
        ValueError: A tolerance is negative, or `align` is not one of these.
        ImportError: NumPy is not installed, or a dump needs safetensors, which is not installed.
    """
    need_numpy()
    for name, number in (("rtol", rtol), ("atol", atol)):
        if number is not None and not number >= 0:
            raise ValueError(f"{name} must not be negative, but is {number}")
    if align not in get_args(Align):
        raise ValueError(f"align must be of {', '.join(get_args(Align))}, not {align!r}")
    first, second = (d if isinstance(d, Dumped) else read_record(Path(d)) for d in (a, b))
    comparison = _Comparison(first, second, Tolerance(rtol, atol), align)
    result = DiffResult(across=comparison.across)
    result.compared = list(comparison.tensors())
    followed = comparison.follow(result) if comparison.across and result.first else None
    result.uninitialized = comparison.uninitialized
    if not result.compared:
        unread = "".join(f"; not read: {one}" for one in comparison.unread[:3])
        raise ResultError(
            f"The dumps have no tensor in common{unread}",
            where=f"{first.folder} and {second.folder}",
            fix="Dump outputs of both, of the same model. Files of tensors need names of operators "
            f"or modules: write a table {' or '.join(TABLES)} beside them"
            if FRAMEWORK in comparison.frameworks
            else "Dump outputs of both, of the same model",
        )
    result.unread = comparison.unread
    result.spread = spread_of(
        (one.a.module, one.step, one.a.name, not one.same) for one in result.compared
    )
    if rtol is None and atol is None and not comparison.across:
        result.precisions = precisions(result.compared)
        inexact = bool(result.precisions) or comparison.tolerance != Tolerance(0.0, 0.0)
        has_inputs = any(one.what == "input" for one in result.compared)
        if inexact and has_inputs and not comparison.has_statistics:
            judged = judge(result.compared)
            result.created, result.not_judged = judged.created, judged.left_out
            result.jump = judged.jump
            result.spread = judged.spread if judged.created else result.spread
    mine, theirs = (
        [one for one in tensors if not (result.precisions and _is_cast(dumped, one))]
        for dumped, tensors in zip((first, second), comparison.alone, strict=True)
    )
    result.alone = len(mine) + len(theirs)
    result.first_alone = _described(first, mine), _described(second, theirs)
    # Frameworks and modes move values in different ways.
    moves = comparison.across or not is_one_framework(first.index.ops, second.index.ops)
    with_tensors = [{tensor.op for tensor in d.index.tensors} for d in (first, second)]
    matched = set(comparison.pairs), set(comparison.pairs.values())
    result.unmatched_a, result.unmatched_b = (
        [
            _facts(op)
            for n, op in enumerate(d.index.ops)
            if n in present
            and n not in taken
            and not (moves and is_movement(op))
            and not (result.precisions and op.word == "cast")
        ]
        for d, present, taken in zip((first, second), with_tensors, matched, strict=True)
    )
    if result.first is not None and followed is not None:
        result.suspects, result.suspects_b, result.likely = followed.explain(result.first)
    elif result.first is not None and result.first.inputs_agree is not True:
        result.suspects = _between(_places(first.index.ops), result)
    more = result.unmatched_a or result.unmatched_b or result.alone
    result.complete = not result.unread and (comparison.across or not (more or result.jump))
    return result


def _places(ops: Sequence[DumpedOp]) -> dict[int, int]:
    """Return the numbers of operators by their ids."""
    places: dict[int, int] = {}
    for number, op in enumerate(ops):
        places.setdefault(op.id, number)
    return places


def _between(places: Mapping[int, int], result: DiffResult) -> list[OpFacts]:
    """Return the operators without a counterpart that ran just before the first difference."""
    differing = next(n for n, one in enumerate(result.compared) if not one.same)
    end = places[result.compared[differing].a.id]
    agreeing = [places[one.a.id] for one in result.compared[:differing] if one.what == "output"]
    begin = max((number for number in agreeing if number < end), default=-1)
    return [one for one in result.unmatched_a if begin < places[one.id] < end]


def _is_cast(dumped: Dumped, tensor: DumpedTensor) -> bool:
    """Return True for a gradient of a cast, which has none if it changes nothing."""
    return dumped.index.ops[tensor.op].word == "cast"


def _described(dumped: Dumped, tensors: Sequence[DumpedTensor]) -> str | None:
    if not tensors:
        return None
    first = tensors[0]
    name = dumped.index.ops[first.op].name
    place = f"step {first.step}, execution {first.execution}"
    return f"{first.what} {first.position} of op {name!r}, {place}"


class _Comparison:
    def __init__(self, first: Dumped, second: Dumped, tolerance: Tolerance, way: Align) -> None:
        self.first = first
        self.second = second
        self.tolerance = tolerance
        ops = first.index.ops, second.index.ops
        is_open = way == "auto"
        way = ways(*ops) if way == "auto" else way
        self.frameworks = frameworks(ops[0]) | frameworks(ops[1])
        if is_open and self.frameworks == {FRAMEWORK} and _have_common_names(*ops):
            way = "names"
        self.across = way == "values" or frameworks(ops[0]) != frameworks(ops[1])
        versions = [{op.namespace for op in listed} for listed in ops]
        is_one_release = versions[0] == versions[1] and FRAMEWORK not in self.frameworks
        if tolerance == Tolerance() and not self.across and is_one_release:
            # The same releases compute the same bits.
            self.tolerance = Tolerance(0.0, 0.0)
        self.pairs: dict[int, int] = {}
        if is_open and self.across and FRAMEWORK in self.frameworks:
            self.pairs = self._by_module()
        if not self.pairs:
            self.pairs = align_ops(*ops, lambda: (_outlines(first), _outlines(second)), way)
        #: What could not be read of files of other programs.
        self.unread = [
            f"{dumped.folder / left.first}: {left.reason}"
            for dumped in (first, second)
            if isinstance(dumped, TensorFiles)
            for left in dumped.index.left_out
        ]
        #: Whether statistics were compared in place of values.
        self.has_statistics = False
        #: Number of tensors that have no values yet.
        self.uninitialized = 0
        #: Tensors of matched operators that only the first or only the second dump has.
        self.alone: tuple[list[DumpedTensor], list[DumpedTensor]] = ([], [])

    def _by_module(self) -> dict[int, int]:
        """Pair tensors of files with the operators or modules that their names say."""
        outlines = [
            {number: outline.output for number, outline in _outlines(dumped).items()}
            for dumped in (self.first, self.second)
        ]
        for dumped, outputs in zip((self.first, self.second), outlines, strict=True):
            if isinstance(dumped, TensorFiles):
                # Which operator made which of several tensors that a module returns is not known.
                for tensor in dumped.index.tensors:
                    if tensor.what == "output" and tensor.position != "0":
                        outputs.pop(tensor.op, None)
        ops = self.first.index.ops, self.second.index.ops
        if isinstance(self.first, TensorFiles):
            return by_module(ops[0], outlines[0], ops[1], outlines[1])
        found = by_module(ops[1], outlines[1], ops[0], outlines[0])
        return {number: other for other, number in found.items()}

    def tensors(self) -> Iterator[Compared]:
        """Yield a comparison of each tensor that is in both dumps."""
        theirs = self._keys(self.second)
        mine = self._keys(self.first)
        backwards = {number: tensor for tensor, number in mine.items()}
        #: Operator and execution -> whether its inputs and weights agreed.
        read: dict[tuple[int, int, int], bool] = {}
        used: set[int] = set()
        tensors = self.first.index.tensors
        numbers: Sequence[int] = range(len(tensors))
        if isinstance(self.first, TensorFiles) and not isinstance(self.second, TensorFiles):
            # Only the dump knows in which order operators ran.
            numbers = sorted(numbers, key=lambda number: self.pairs.get(tensors[number].op, -1))
        for number in numbers:
            tensor = tensors[number]
            if tensor.op not in self.pairs:
                continue
            key = backwards[number]
            other_number = theirs.get((self.pairs[tensor.op], *key[1:]))
            if self.across and not self._is_comparable(tensor):
                continue
            if other_number is None:
                self.alone[0].append(tensor)
                continue
            used.add(other_number)
            if is_uninitialized(self.first.index.ops[tensor.op], tensor):
                self.uninitialized += 1
                continue
            other = self.second.index.tensors[other_number]
            compared = self._compare(tensor, other)
            execution = (tensor.op, tensor.step, tensor.execution)
            if tensor.what in ("input", "weight"):
                read[execution] = read.get(execution, True) and compared.same
                if self.across:
                    continue
            if tensor.what == "output":
                compared.inputs_agree = read.get(execution)
            yield compared
        if not self.across:
            matched = set(self.pairs.values())
            for number, tensor in enumerate(self.second.index.tensors):
                if tensor.op in matched and number not in used:
                    self.alone[1].append(tensor)

    def follow(self, result: DiffResult) -> Parting | None:
        """Judge what differs by where the runs part, if inputs are known.

        Pairs of different types after which values agree again do not belong together.
        """
        parting = Parting((self.first, self.second), self.tolerance, self.pairs, result.compared)
        if not parting.known:
            return None
        kept = []
        for one in result.compared:
            if not one.same and parting.is_implausible(one):
                self.pairs.pop(parting.node(one)[0], None)
                continue
            if one.what == "output" and not one.same and one.inputs_agree is not False:
                one.inputs_agree = parting.inputs_agree(one)
            kept.append(one)
        result.compared = kept
        first = result.first
        if first is not None and first.what == "output" and (other := parting.closest(first)):
            nearest = self._compare(
                *(self._output(*one) for one in ((0, parting.node(first)), (1, other)))
            )
            nearest.inputs_agree = first.inputs_agree
            self.pairs[parting.node(first)[0]] = other[0]
            kept[kept.index(first)] = nearest
        return parting

    def _output(self, side: int, node: tuple[int, int, int]) -> DumpedTensor:
        """Return what an execution wrote."""
        tensors = (self.first, self.second)[side].index.tensors
        return next(
            one
            for one in tensors
            if one.what == "output" and (one.op, one.step, one.execution) == node
        )

    def _is_comparable(self, tensor: DumpedTensor) -> bool:
        """Return True if a tensor means the same thing in the other framework's operator."""
        if tensor.position != "0" or tensor.what not in ("input", "output"):
            return False
        one, other = self.first.index.ops, self.second.index.ops
        return tensor.what == "output" or alike(one[tensor.op], other[self.pairs[tensor.op]])

    def _keys(self, dumped: Dumped) -> dict[tuple[Any, ...], int]:
        """Map a key that identifies each tensor of a dump to its number.

        Within one framework steps and executions are comparable. Across frameworks only the order
        is.
        """
        keys: dict[tuple[Any, ...], int] = {}
        seen: dict[tuple[Any, ...], int] = {}
        for number, tensor in enumerate(dumped.index.tensors):
            # A cast that changes nothing leaves a weight where there is another input.
            what = "input" if tensor.what == "weight" else tensor.what
            kind = (tensor.op, what, tensor.position)
            order = seen.get(kind, 0)
            seen[kind] = order + 1
            when = (order,) if self.across else (tensor.step, tensor.execution)
            keys[(*kind, *when)] = number
        return keys

    def _compare(self, tensor: DumpedTensor, other: DumpedTensor) -> Compared:
        one, two = self.first.index.ops[tensor.op], self.second.index.ops[other.op]
        difference: Difference | None
        if tensor.file is None or other.file is None:
            self.has_statistics = True
            difference = compare_statistics(
                _figures(self.first, tensor),
                _figures(self.second, other),
                (tensor.dtype, other.dtype),
                self.tolerance,
            )
        else:
            layouts = one.layout, two.layout
            difference = compare_tensors(
                self.first.read(tensor),
                self.second.read(other),
                self.tolerance,
                layouts,
                self.across,
            )
        return Compared(
            _facts(one),
            _facts(two),
            tensor.what,
            tensor.position,
            tensor.step,
            tensor.execution,
            difference,
            [tensor.shape, other.shape],
            [tensor.dtype, other.dtype],
            weight=tensor.weight,
        )


def _have_common_names(first: Sequence[DumpedOp], second: Sequence[DumpedOp]) -> bool:
    return not {op.name for op in first}.isdisjoint(op.name for op in second)


def _outlines(dumped: Dumped) -> dict[int, Outline]:
    """Return the operators with an output, by number, in the order of their first execution."""
    found: dict[int, Outline] = {}
    for tensor in dumped.index.tensors:
        if tensor.what == "output" and tensor.position == "0" and tensor.op not in found:
            op = dumped.index.ops[tensor.op]
            figures = functools.cache(functools.partial(_known_figures, dumped, tensor))
            found[tensor.op] = Outline(op, tensor, figures)
    return found


def _known_figures(dumped: Dumped, tensor: DumpedTensor) -> Statistics | None:
    floating = "float" in tensor.dtype or "complex" in tensor.dtype
    return _figures(dumped, tensor) if floating else None


def _figures(dumped: Dumped, tensor: DumpedTensor) -> Statistics:
    if tensor.statistics is None:
        return statistics_of(dumped.read(tensor))
    # The bins of two histograms may differ.
    return Statistics(**{**vars(tensor.statistics), "histogram": []})


def _facts(op: DumpedOp) -> OpFacts:
    return OpFacts(**{item.name: getattr(op, item.name) for item in fields(OpFacts)})
