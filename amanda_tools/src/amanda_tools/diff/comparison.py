"""Comparison of two dumps: find the first operator at which they differ.

`align` decides which operators correspond, and `numbers` measures how far tensors are apart.
`amanda diff` is the command-line interface. Over 400 lines: one result, and what makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from amanda_core.errors import ResultError
from amanda_core.results import Table
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
from amanda_tools.diff.created import (
    CreatedError,
    created_json,
    created_table,
    created_title,
    difference_in_kind,
    judge,
    largest_of,
    not_judged,
    precisions,
)
from amanda_tools.diff.numbers import Difference, Tolerance, compare_statistics, compare_tensors
from amanda_tools.diff.parting import Parting
from amanda_tools.diff.readers import read_record
from amanda_tools.diff.spread import Reach, spread_chart, spread_of
from amanda_tools.diff.tensor_files import FRAMEWORK, TABLES, TensorFiles
from amanda_tools.dump.files import Dumped
from amanda_tools.dump.index import DumpedOp, DumpedTensor
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    dataframe,
    fields_of,
    format_count,
    render_html,
    render_json,
)
from amanda_tools.kit.tensors.statistics import Statistics, statistics_of
from amanda_tools.kit.tensors.values import need_numpy

__all__ = ["DiffResult", "compare"]


@dataclass
class DiffResult:
    """Result of a comparison.

    Attributes:
        compared: The tensors that are in both dumps, in the order of the first; of files of another
            program and a dump, in the order of the dump.
        unmatched_a: Operators of the first dump without a counterpart. Across frameworks and
            modes this leaves out operators that only move or create values, and across precisions
            casts.
        unmatched_b: Operators of the second dump without a counterpart.
        alone: Number of tensors of matched operators that only one dump has.
        first_alone: The first of them in each dump, described; None if it has none.
        across: Whether values decide which operators correspond, as across frameworks.
        complete: Whether each dump has all that the other has, and all could be read. If values
            decide, what only one has does not count: two frameworks or implementations divide a
            network into other operators.
        uninitialized: Number of tensors that were not compared, because they have no values yet.
        precisions: Dtypes of the runs, such as ``float32 and bfloat16``, if they differ.
        created: The error that each execution makes, from the largest to the smallest, if the
            precisions, releases or modes of the runs differ and nobody gave a tolerance.
        not_judged: Number of executions whose created error is not known, then.
        jump: The first value that is not rounded, such as an index, and that differs since the
            values differ from which an operator made it, then; None if there is none.
        unread: What could not be read of files that another program wrote, and why.
        spread: The modules and steps in which tensors differ, in the order of the first run; if
            created errors are known, those in which operators make more than is explained.
        suspects: Operators of the first dump that part the runs before the first difference, unless
            the inputs of this one agree: what they read is in both dumps, and what they write, and
            all until the difference, is in one only. If inputs were not recorded, those without a
            counterpart that ran after the last operator that agrees.
        suspects_b: The same of the second dump, if inputs were recorded. These may be parts of the
            operator itself.
        likely: What kind of mistake the values show, such as ``scale: B is 8 times A``; None if
            they show none, or values do not decide which operators correspond.
    """

    compared: list[Compared] = field(default_factory=list)
    unmatched_a: list[OpFacts] = field(default_factory=list)
    unmatched_b: list[OpFacts] = field(default_factory=list)
    alone: int = 0
    first_alone: tuple[str | None, str | None] = (None, None)
    across: bool = False
    complete: bool = True
    uninitialized: int = 0
    precisions: list[str] = field(default_factory=list)
    created: list[CreatedError] = field(default_factory=list)
    not_judged: int = 0
    jump: Compared | None = None
    unread: list[str] = field(default_factory=list)
    spread: list[Reach] = field(default_factory=list)
    suspects: list[OpFacts] = field(default_factory=list)
    suspects_b: list[OpFacts] = field(default_factory=list)
    likely: str | None = None

    @property
    def first(self) -> Compared | None:
        """Return the first tensor beyond the tolerance, or None.

        If values decide what corresponds, an output whose inputs agree comes before others.
        """
        differing = [one for one in self.compared if not one.same]
        sure = [one for one in differing if self.across and one.inputs_agree is True]
        return next(iter(sure or differing), None)

    @property
    def same(self) -> bool:
        """Return True if all tensors that are in both dumps are within the tolerance; if precisions
        differ, if no operator makes more error than they explain.

        `complete` says whether they are all tensors.
        """
        if self.created:
            return not self.created[0].is_beyond and all(one.difference for one in self.compared)
        return self.first is None

    def conclusion(self, limit: int | None = None) -> str:
        """Return what the comparison found, in a few lines; first what was not compared.

        Args:
            limit: Number of operators without a counterpart that are named; None for all.
        """
        texts = [f"Not read: {one}" for one in self.unread[:limit]]
        if len(texts) < len(self.unread):
            texts.append(f"Not read: {len(self.unread) - len(texts)} more")
        for name, ops in (("A", self.unmatched_a), ("B", self.unmatched_b)):
            if ops:
                named = ", ".join(op.name for op in ops[:limit])
                more = len(ops) - len(ops[:limit])
                texts.append(f"Only in {name}: {named}{f' and {more} more' if more else ''}")
        alone = [
            f"; first in {name}: {one}"
            for name, one in zip("AB", self.first_alone, strict=True)
            if one
        ]
        if self.created:
            if self.alone:
                count = format_count(self.alone, "tensor")
                texts.append(f"{count} that only one dump has were not compared{''.join(alone)}.")
            return "\n".join([*texts, *self._conclusion_on_precision()])
        if self.precisions:
            texts.append(
                f"The runs have different precisions ({'; '.join(self.precisions)}). Record what "
                "operators read, too, to see which one makes the error: "
                "dump:values=[inputs,weights,outputs]"
            )
        count = format_count(len(self.compared), "tensor")
        exact = all(one.difference is not None and one.difference.equal for one in self.compared)
        how = "equal bit for bit" if exact else "within the tolerance"
        if self.first is not None:
            texts.append(f"First: {self.first}")
            for name, ops in (("A", self.suspects), ("B", self.suspects_b)):
                suspects = (
                    f"op {op.name!r}{f', at {op.source}' if op.source else ''}"
                    for op in ops[:limit]
                )
                if ops:
                    texts.append(f"Only in {name}, just before it: {'; '.join(suspects)}")
            if self.likely is not None:
                texts.append(f"Likely {self.likely}")
        elif self.unread:
            texts.append(f"The {count} that could be read and correspond are {how}.")
        elif not self.complete:
            texts.append(
                f"The {count} that both dumps have are {how}. One dump has more, which was not "
                f"compared{''.join(alone)}."
            )
        elif self.unmatched_a or self.unmatched_b:
            texts.append(
                f"The {count} that correspond are {how}; the operators without a counterpart were "
                "not compared."
            )
        else:
            texts.append(f"No difference in {count}: all are {how}.")
        return "\n".join(texts)

    def _conclusion_on_precision(self) -> list[str]:
        texts = [difference_in_kind(self.precisions), *not_judged(self.not_judged)]
        if self.jump is not None:
            texts.append(f"What follows from this was not judged: {self.jump}")
        misshapen = next((one for one in self.compared if one.difference is None), None)
        if misshapen is not None:
            texts.append(f"First: {misshapen}")
        if misshapen is None or self.created[0].is_beyond:
            texts += largest_of(self.created)
        return texts

    @property
    def title(self) -> str:
        """Return a summary in one line."""
        if self.created:
            return created_title(self.created)
        beyond = sum(not one.same for one in self.compared)
        equal = sum(one.difference is not None and one.difference.equal for one in self.compared)
        text = f"{beyond} of {len(self.compared)} tensors differ, {equal} are equal bit for bit"
        if self.alone:
            text += f"; {format_count(self.alone, 'tensor')} in one dump only"
        if self.uninitialized:
            text += f"; {format_count(self.uninitialized, 'tensor')} without values yet left out"
        unmatched = len(self.unmatched_a), len(self.unmatched_b)
        if any(unmatched):
            text += f"; operators without counterpart: {unmatched[0]} and {unmatched[1]}"
        return text

    def table(self, everything: bool = False) -> Table:
        """Return a table with one row for each tensor that differs.

        Args:
            everything: Include the tensors that agree.
        """
        if self.created:
            return created_table(self.title, self.created, everything)
        columns = ("op", "tensor", "step", "max abs", "max rel", "cosine", "ulp", "beyond")
        rows = [
            (
                one.a.name if one.a.name == one.b.name else f"{one.a.name} | {one.b.name}",
                f"{one.what} {one.position}{f' {one.weight}' if one.weight else ''}",
                one.step,
                *_cells(one),
            )
            for one in self.compared
            if everything or not one.same
        ]
        return Table(self.title, columns, rows)

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        return render_json(
            {
                "format": "amanda.diff/1",
                "same": self.same,
                "first": self.first,
                **fields_of(self),
                "created": created_json(self.created),
                "charts": self._charts(),
            }
        )

    def _charts(self) -> list[charts.Chart]:
        beyond = sum(not one.same for one in self.compared)
        first = self.first
        figures = [
            charts.figure("tensors compared", len(self.compared)),
            charts.figure("beyond the tolerance", beyond),
        ]
        if first is not None:
            figures.append(charts.figure("first", first.a.name, "", first.what, first.a.name))
        figures.append(charts.figure("in one dump only", self.alone))
        return [
            charts.figures(*figures),
            *([spread_chart()] if self.spread else []),
            charts.points(
                "Where the runs diverge",
                "compared",
                "difference.max_abs",
                value_label="largest difference",
                label="a.name",
                color="what",
                first="first",
                log=True,
                x_label="in the order of the first dump",
            ),
        ]

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row for each tensor; needs pandas."""
        return dataframe(Compared, self.compared)

    def _repr_html_(self) -> str:
        return render_html([self.table()])


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


def _cells(one: Compared) -> Sequence[object]:
    difference = one.difference
    if difference is None:
        return ("", "", "", "", f"shapes {one.shapes[0]} and {one.shapes[1]}")
    numbers = (difference.max_abs, difference.max_rel, difference.cosine, difference.ulp)
    inputs = ["" if number is None else float(f"{number:.4g}") for number in numbers]
    beyond: object = difference.beyond
    if difference.first is None and difference.values:
        beyond = ", ".join(difference.values)
    return (*inputs, beyond)
