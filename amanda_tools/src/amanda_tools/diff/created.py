"""Created errors: the operator that adds more error than precision explains.

Two runs of different precision, release or mode differ at every operator, so the first difference
says nothing. Here each execution is judged by the error of what it wrote against the error of what
it read and the rounding of its dtype.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from amanda_core.results import Table
from amanda_tools.diff.compared import Compared
from amanda_tools.diff.numbers import epsilon, spacing
from amanda_tools.diff.spread import Reach, spread_of
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output.rendering import fields_of, format_count

__all__ = [
    "CreatedError",
    "Hidden",
    "Judged",
    "created_json",
    "created_table",
    "created_title",
    "difference_in_kind",
    "differing_precisions",
    "execution_of",
    "judge",
    "largest_of",
    "not_judged",
    "precisions",
]

#: Ratio of the error that an operator wrote and what explains it, beyond which it makes an error.
#: Correct operators of networks stay below 3 in bfloat16 and float16.
LIMIT = 4.0
_LEAST = sys.float_info.min
_FORWARD = ("input", "weight", "output")
#: Types whose derivative jumps: a tiny change of an input may change a gradient altogether.
_JUMPS = frozenset(
    {
        *("relu", "relu6", "leaky_relu", "prelu", "elu", "hardtanh", "hardswish", "hardsigmoid"),
        *("clip", "abs", "sign", "maximum", "minimum", "max", "min", "max_pool1d", "max_pool2d"),
        *("max_pool3d", "adaptive_max_pool2d", "where", "topk", "sort", "floor", "ceil", "round"),
    }
)
#: Types that sum products. Rounding grows with the square root of the number of terms.
_PRODUCTS = frozenset({"linear", "matmul", "einsum", "attention", "conv1d", "conv2d", "conv3d"})
#: Types that normalize, by sums over an axis. Their gradients nearly cancel for some losses.
_NORMALIZING = frozenset({"softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm"})
#: How much of the error of its terms a gradient may have, since its terms may cancel.
_OF_GRADIENTS, _OF_NORMALIZING = 2.0, 4.0
#: Types whose result has the *absolute* error of the input as its relative error.
_PERIODIC_OR_GROWING = frozenset({"sin", "cos", "tan", "exp", "exp2", "sinh", "cosh"})


@dataclass
class CreatedError:
    """How much error one execution of an operator adds, forward or backward.

    Errors are 2-norms of the difference, relative to the 2-norm of the values.

    Attributes:
        op: The operator, in the first run.
        what: What has the largest error of what it wrote, such as ``output 0``.
        phase: ``forward`` or ``backward``.
        step: The step.
        execution: The execution.
        error: Error of what it wrote.
        error_in: Largest error of what it read.
        ratio: ``error`` divided by what ``error_in`` and rounding explain; infinite if it wrote
            something else although what it read was equal and rounding plays no part.
        outside: Whether the error is in what the operator read, and no operator before it has such
            an error: it comes from outside, such as data or a weight.
        process: Which process it is in, such as ``rank1``; None if the run has one only.
    """

    op: OpFacts
    what: str
    phase: str
    step: int
    execution: int
    error: float
    error_in: float
    ratio: float
    outside: bool = False
    process: str | None = None

    @property
    def is_beyond(self) -> bool:
        """Return True if it is more than precision explains."""
        return self.ratio > LIMIT

    def __str__(self) -> str:
        """Describe the operator and its error."""
        place = f"{self.what} of op {self.op.name!r}"
        place += f", module {self.op.module!r}" if self.op.module else ""
        place += f", at {self.op.source}" if self.op.source else ""
        place += f", step {self.step}, execution {self.execution}"
        place += "" if self.process is None else f", {self.process}"
        if self.outside:
            explained = "while no value before it has an error as large"
        else:
            explained = f"{self.ratio:.3g} times what its inputs ({self.error_in:.2g}) and rounding"
            explained += " explain"
        return f"{place}: error {self.error:.2g} of its norm, {explained}"


def precisions(compared: Sequence[Compared]) -> list[str]:
    """Return the floating-point dtypes of tensors whose dtypes differ, such as ``float32 and
    bfloat16``.
    """
    return differing_precisions((one.dtypes[0], one.dtypes[1]) for one in compared)


def differing_precisions(dtypes: Iterable[tuple[str, str]]) -> list[str]:
    """Return those of pairs of dtypes that are of floating-point numbers and differ, as text."""
    pairs = (pair for pair in dict.fromkeys(dtypes) if pair[0] != pair[1])
    return [f"{a} and {b}" for a, b in pairs if epsilon(a) is not None and epsilon(b) is not None]


@dataclass
class Judged:
    """How much error the executions of two runs make, as far as it can be judged.

    Attributes:
        created: What each execution adds, from the largest ratio to the smallest.
        left_out: How many were not judged: the dumps lack what they read, or a tiny change may
            change what they wrote or read altogether.
        jump: The first value that is not rounded, such as an index, and differs since the values
            differ from which an operator made it; None if there is none.
        spread: The modules and steps in which executions make more error than is explained.
    """

    created: list[CreatedError]
    left_out: int = 0
    jump: Compared | None = None
    spread: list[Reach] = field(default_factory=list)


@dataclass
class Hidden:
    """What tensors do not show of their errors.

    Attributes:
        errors: Errors of what an execution read beyond those that the tensors show, by
            `execution_of`.
        shown: Returns how much of an error of a tensor is shown.
    """

    errors: Mapping[object, float] = field(default_factory=dict)
    shown: Callable[[Compared, float], float] = lambda one, error: error


def judge(compared: Sequence[Compared], hidden: Hidden | None = None) -> Judged:
    """Judge the executions of two runs, in the order of the first.

    Args:
        compared: The tensors of both runs, those that an execution read before those that it wrote.
        hidden: Which errors the tensors do not show; None if they show all.
    """
    hidden = hidden or Hidden()
    result = Judged([])
    #: Largest error of a value so far.
    largest = 0.0
    #: Execution -> largest error of what its forward pass read and wrote.
    forward: dict[tuple[object, ...], float] = {}
    for (key, phase), parts in _executions(compared).items():
        read = [one for one in parts if one.what in ("input", "weight", "grad_output")]
        wrote = [one for one in parts if one.what in ("output", "grad_input")]
        worst = max(read, key=_error, default=None)
        error_in = 0.0 if worst is None else _error(worst)
        # Gradients that several operators give are added without an operator, and may cancel.
        is_explained = phase == "backward" or (math.isinf(error_in) and result.jump is not None)
        if worst is not None and not (is_explained or _is_overwritten(worst)):
            explained = largest + hidden.shown(worst, _rounding(worst))
            ratio = error_in / (explained or _LEAST)
            if ratio > LIMIT:
                result.created.append(_created(worst, phase, largest, ratio, outside=True))
        largest = max(largest, error_in if math.isfinite(error_in) else 0.0)
        if phase == "backward":  # Backward operators read what the forward pass saved.
            error_in = max(error_in, forward.get(key, 0.0))
        before = hidden.errors.get((key, phase), 0.0)
        jumps = phase == "backward" and (parts[0].a.word in _JUMPS or _vanishes(wrote, read))
        if error_in and (jumped := [one for one in wrote if _jumps(one)]):
            result.jump = result.jump or jumped[0]
            jumps = True
        if wrote and read and not jumps and math.isfinite(error_in):
            ratios = [
                _error(one, _reference(one, read, phase))
                / (
                    _gain(one, read, phase)
                    * (error_in + hidden.shown(one, math.hypot(before, _rounding(one, read))))
                    or _LEAST
                )
                for one in wrote
            ]
            ratio = max(ratios)
            result.created.append(_created(wrote[ratios.index(ratio)], phase, error_in, ratio))
        else:
            result.left_out += bool(wrote)
        errors = [error for error in map(_error, wrote) if math.isfinite(error)]
        largest = max([largest, *errors])
        if phase == "forward":
            forward[key] = max([error_in, *errors])
    result.spread = spread_of(
        (one.op.module, one.step, one.op.name, one.is_beyond) for one in result.created
    )
    result.created.sort(key=lambda one: -one.ratio)
    return result


def _is_overwritten(one: Compared) -> bool:
    """Return True for a tensor into which an operator writes: parts may have no values yet."""
    return one.a.word == "assign_slice" and one.what == "input" and one.position == "0"


def _vanishes(wrote: Sequence[Compared], read: Sequence[Compared]) -> bool:
    """Return True if a gradient of what is normalized is as small as its rounding: the normalized
    values do not depend on it, such as their sum.
    """
    norms = [
        max((one.difference.norm or 0.0 for one in parts if one.difference), default=0.0)
        for parts in (wrote, [one for one in read if one.what == "grad_output"])
    ]
    is_normalizing = bool(wrote) and wrote[0].a.word in _NORMALIZING
    return is_normalizing and norms[0] <= LIMIT * _rounding(wrote[0]) * norms[1]


def _gain(one: Compared, read: Sequence[Compared], phase: str) -> float:
    """Return how much of the error of its inputs an operator may write, if more than that."""
    if phase == "backward":
        return _OF_NORMALIZING if one.a.word in _NORMALIZING else _OF_GRADIENTS
    if one.a.word not in _PERIODIC_OR_GROWING:
        return 1.0
    magnitudes = [
        (tensor.difference.norm or 0.0) / math.sqrt(max(math.prod(tensor.shapes[0]), 1))
        for tensor in read
        if tensor.difference is not None
    ]
    return max([1.0, *magnitudes])


def _jumps(one: Compared) -> bool:
    """Return True if a value that is not rounded, such as an index or a comparison, differs."""
    return math.isinf(_error(one)) and any(epsilon(dtype) is None for dtype in one.dtypes)


def created_title(judged: Sequence[CreatedError]) -> str:
    """Return a summary in one line."""
    beyond = sum(one.is_beyond for one in judged)
    executions = format_count(len(judged), "execution")
    return f"{beyond} of {executions} make more error than precision explains"


def created_table(title: str, judged: Sequence[CreatedError], everything: bool) -> Table:
    """Return a table with a row for each execution that makes an error, or for each."""
    columns = ("op", "value", "step", "error", "error of inputs", "ratio")
    rows = [
        (
            *(one.op.name, f"{one.phase} {one.what}", one.step),
            *(float(f"{number:.3g}") for number in (one.error, one.error_in, one.ratio)),
        )
        for one in judged
        if everything or one.is_beyond
    ]
    return Table(title, columns, rows)


def created_json(judged: Sequence[CreatedError]) -> list[dict[str, object]]:
    """Return what a result's JSON has of created errors; infinite numbers are null."""
    return [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields_of(one).items()
        }
        for one in judged
    ]


def difference_in_kind(precisions: Sequence[str]) -> str:
    """Return a sentence on why operators are judged by the error that they make."""
    kinds = f"precisions ({'; '.join(precisions)})" if precisions else "releases or modes"
    return f"The runs have different {kinds}: operators are judged by the error that they make."


def not_judged(count: int) -> list[str]:
    """Return a sentence on executions that were not judged, if there are any."""
    what = f"{format_count(count, 'execution')}, whose inputs were not recorded or may jump"
    return [f"Not judged: {what}."] if count else []


def largest_of(judged: Sequence[CreatedError]) -> list[str]:
    """Return sentences on the largest of created errors."""
    largest = judged[0]
    if not largest.is_beyond:
        return [
            "No operator makes more error than its inputs and rounding explain. "
            f"Largest: {largest}."
        ]
    said = "" if largest.outside else ": this operator makes the error"
    texts = [f"{'Outside' if largest.outside else 'Largest'}: {largest}{said}."]
    if largest.op.word in ("dropout", "random"):
        texts.append("It draws random numbers, which are others in another dtype.")
    return texts


def _created(
    one: Compared, phase: str, error_in: float, ratio: float, outside: bool = False
) -> CreatedError:
    what = f"{one.what} {one.position}" + (f" ({one.weight})" if one.weight is not None else "")
    error = _error(one)
    return CreatedError(
        one.a, what, phase, one.step, one.execution, error, error_in, ratio, outside
    )


def execution_of(one: Compared) -> tuple[tuple[object, ...], str]:
    """Return what identifies the execution of a tensor, forward and backward apart."""
    phase = "forward" if one.what in _FORWARD else "backward"
    return (one.a.id, one.a.type, one.a.name, one.step, one.execution), phase


def _executions(
    compared: Sequence[Compared],
) -> dict[tuple[tuple[object, ...], str], list[Compared]]:
    """Return the tensors of each execution, by their key."""
    together: dict[tuple[tuple[object, ...], str], list[Compared]] = {}
    for one in compared:
        together.setdefault(execution_of(one), []).append(one)
    return together


def _error(one: Compared, norm: float | None = None) -> float:
    """Return the error of a tensor relative to its norm, or to another one."""
    difference = one.difference
    if difference is None:
        return math.inf
    if difference.equal or difference.apart == 0:
        return 0.0
    if difference.apart is None or any(epsilon(dtype) is None for dtype in one.dtypes):
        return math.inf  # Numbers that are not rounded, NaNs, or infinities.
    scale = max(difference.norm or 0.0, norm or 0.0)
    return difference.apart / scale if scale else math.inf


def _rounding(one: Compared, read: Sequence[Compared] = ()) -> float:
    """Return the relative error that rounding the results of an operator explains."""
    dtypes = [dtype for tensor in (one, *read) for dtype in tensor.dtypes]
    coarsest = max((found for dtype in dtypes if (found := epsilon(dtype))), default=0.0)
    norm = 0.0 if one.difference is None else one.difference.norm or 0.0
    if norm:  # Tiny numbers are rounded to multiples of the smallest one.
        smallest = max(spacing(dtype) for dtype in one.dtypes)
        coarsest += smallest * math.sqrt(math.prod(one.shapes[0])) / norm
    # Sums in a coarser dtype are rounded to it at the end only.
    if coarsest > 1e-6 or not read:
        return coarsest
    counts = sorted((math.prod(tensor.shapes[0]) for tensor in read), reverse=True)
    wrote = max(math.prod(one.shapes[0]), 1)
    terms = counts[0] / wrote
    if one.a.word in _PRODUCTS and len(counts) > 1:
        terms = math.sqrt(counts[0] * counts[1] / wrote)
    elif one.a.word in _NORMALIZING and one.shapes[0]:
        terms = one.shapes[0][-1]
    return coarsest * math.sqrt(max(terms, 1.0))


def _reference(one: Compared, read: Sequence[Compared], phase: str) -> float:
    """Return the norm that a result would have if its terms did not cancel."""
    count = math.prod(one.shapes[0])
    norms = [
        (tensor.difference.norm or 0.0, math.prod(tensor.shapes[0]))
        for tensor in read
        if tensor.difference is not None and tensor.what != "weight"
    ]
    if phase == "backward":
        # The gradient of what is broadcast is a sum.
        summed = [norm for norm, size in norms if count < size and _is_broadcast(one, read)]
        return max(summed, default=0.0)
    if one.a.word == "sum":
        return max((norm for norm, _ in norms), default=0.0)
    if one.a.word in ("add", "sub", "mean"):
        return max((norm * math.sqrt(count / max(size, 1)) for norm, size in norms), default=0.0)
    return 0.0


def _is_broadcast(one: Compared, read: Sequence[Compared]) -> bool:
    """Return True if a value has the shape of an input, or one that is broadcast to it."""
    shape = one.shapes[0]
    return any(
        len(shape) <= len(other.shapes[0])
        and all(a in (1, b) for a, b in zip(shape[::-1], other.shapes[0][::-1], strict=False))
        for other in read
    )
