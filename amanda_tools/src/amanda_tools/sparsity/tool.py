"""`Sparsity`: how many zeros the tensors of each operator hold, and what they would save.

Owns which tensors are measured and how many multiplications their zeros make unnecessary. `zeros`
counts, `formulas` says what a product costs, and `result` holds the figures.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Any, Literal, NamedTuple

from amanda_core import OpContext
from amanda_core.interface.facts import Arithmetic, Facts, NotReadableError
from amanda_core.runtime.weak import Known
from amanda_tools.flops.formulas import FREE, MATMUL, Formula, formula_of
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.operators.tool import OperatorTool, is_eager
from amanda_tools.kit.operators.weights import WeightKeys
from amanda_tools.kit.tensors.arithmetic import numpy_arithmetic
from amanda_tools.kit.tensors.types import is_real, size_of
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.sparsity.result import MeasuredTensor, Product, SparsityResult
from amanda_tools.sparsity.zeros import (
    NUMBERS,
    Counts,
    Order,
    count,
    order_of,
    order_of_weight,
    readable,
    to_list,
    without_zeros,
)

__all__ = ["Sparsity"]

#: Common types of the operators that multiply two operands.
_PRODUCTS = frozenset(word for word in MATMUL if word.startswith(("conv", "linear", "matmul")))
#: Common types of the operators whose channels are the last axis, whatever the rank.
_LAST = frozenset({"attention", "embedding", "layer_norm", "linear", "matmul", "rms_norm"})


class Sparsity(OperatorTool["_Op"]):
    """Measures zeros in inputs, weights and outputs of operators, over all executions.

    Operators that only move values are not measured. The counts stay in the tensor's framework and
    on its device until the result is requested.

    Args:
        limit: Magnitudes below it count as small.
        block: Side of the blocks whose zeros are counted.
        gradients: Whether to measure the gradients of outputs as well.
        channels: Where the channels are in a tensor of unknown layout: ``first`` (the second axis),
            ``last``, or ``auto``. With ``auto`` they are the second axis of tensors of four or five
            axes where the framework has them there, as PyTorch and MXNet, and else the last.
        everything: Whether to measure operators outside the model as well, such as an optimizer's.

    Raises:
        ValueError: An option has a value that it does not allow.

    >>> tool = Sparsity(limit=1e-3, block=4)
    """

    #: The weights of an operator that fuses a layer are measured where its parts read them.
    whole = True
    by_example = True  # Its axes are those of one.

    def __init__(
        self,
        limit: float = 1e-3,
        block: int = 4,
        gradients: bool = False,
        channels: Literal["auto", "first", "last"] = "auto",
        everything: bool = False,
    ) -> None:
        super().__init__(everything)
        if not limit >= 0:
            raise ValueError(f"limit must not be negative, but is {limit}")
        if block < 1:
            raise ValueError(f"block must be at least 1, but is {block}")
        if channels not in ("auto", "first", "last"):
            raise ValueError(f"channels must be auto, first or last, but is {channels!r}")
        self.limit = limit
        self.block = block
        self.gradients = gradients
        self.channels = channels
        #: What was counted of outputs, for the operators that read them. Not of other values: a
        #: program may write its weights and batches without counting that.
        self._made: Known[_Made] = Known()
        self.add_inst_for_op(self.analyse)
        if gradients:
            self.add_inst_for_op(self.analyse_outputs, require_outputs=True)

    def analyse(self, context: OpContext) -> None:
        """Measure the tensors of an op."""
        word = context["type"]
        if word in FREE or not self.is_wanted(context):
            return
        with self._clock:
            op = self.account_of(context, lambda: _Op(context, self.channels))
            op.weights.follow(context)
            values = context.get_inputs() or ()
            positions = [p for p, value in enumerate(values) if is_real(op.facts, value)]
            if positions:
                context.insert_before_op(
                    self.enter, observe=True, inputs=positions, op=op, positions=positions
                )
            context.insert_after_op(self.leave, observe=True, op=op)
            if self.gradients and not context.supports("late_gradients"):
                context.insert_before_backward_op(self.measure_gradients, observe=True, op=op)

    def analyse_outputs(self, context: OpContext) -> None:
        """Measure the gradients of an op's outputs."""
        op = self.known(context)
        if op is None or not context.supports("late_gradients"):
            return
        for position, value in enumerate(context.get_outputs() or ()):
            if is_real(op.facts, value):
                # One routine for each, because gradients need not arrive together. Outputs that
                # are not real numbers have no gradient.
                context.insert_before_backward_op(
                    self.measure_gradient,
                    observe=True,
                    grad_outputs=[position],
                    op=op,
                    position=position,
                )

    def enter(self, *inputs: Any, op: _Op, positions: Sequence[int]) -> None:
        """Measure the inputs of one execution."""
        with self._clock, self._lock:
            given: dict[int, Counts] = {}
            for position, value in zip(positions, inputs, strict=True):
                counts = self._measure(op, ("input", position), value)
                if counts is not None:
                    given[position] = counts
            sizes = op.sizes(positions, inputs)
            op.entered[threading.get_ident() if op.eager else 0] = (given, sizes)

    def leave(self, *outputs: Any, op: _Op) -> None:
        """Measure the outputs of one execution, and count its product."""
        with self._clock, self._lock:
            for position, value in enumerate(outputs):
                self._measure(op, ("output", position), value)
            given, sizes = op.entered.pop(threading.get_ident() if op.eager else 0, ({}, None))
            if op.formula is not None and sizes is not None:
                self._multiply(op, given, sizes, outputs)

    def measure_gradient(self, gradient: Any, op: _Op, position: int) -> None:
        """Measure the gradient of an output of one execution."""
        with self._clock, self._lock:
            self._measure(op, ("gradient", position), gradient)

    def measure_gradients(self, *gradients: Any, op: _Op) -> None:
        """Measure the gradients of all outputs of one execution, where they arrive together."""
        for position, gradient in enumerate(gradients):
            if is_real(op.facts, gradient):
                self.measure_gradient(gradient, op, position)

    def result(self) -> SparsityResult:
        """Return what was measured so far."""
        with self._lock:
            tensors = [
                tensor.facts() for op in self._ops.values() for tensor in op.tensors.values()
            ]
            products = [op.product.facts() for op in self._ops.values() if op.product is not None]
            return SparsityResult(
                self.limit,
                self.block,
                tensors,
                products,
                list(self._notes),
                self._clock.spent / 1e9,
                self._clock.wall / 1e9,
            )

    def _measure(
        self, op: _Op, which: tuple[str, int], value: Any, item: int | None = None
    ) -> Counts | None:
        if isinstance(value, (list, tuple)):
            for index, one in enumerate(value):
                self._measure(op, which, one, index)
            return None
        weight = op.weights.at(which[1], item) if which[0] == "input" else None
        made = self._made.get(value) if which[0] == "input" and weight is None else None
        if made is not None and (
            made.version != op.facts.version(value)
            or made.order != op.order(which, len(made.shape))
        ):
            made = None
        if made is None:
            made = self._count(op, which, value)
        if made is None:
            return None
        if which[0] == "output" and made.version is not None:
            self._made.set(value, made)
        tensor = op.tensors.get((*which, weight))
        if tensor is None:
            tensor = op.tensors[(*which, weight)] = _Tensor(op.new_tensor(*which, weight), op.facts)
        tensor.add(made)
        return made.counts

    def _count(self, op: _Op, which: tuple[str, int], value: Any) -> _Made | None:
        """Count the zeros of a value; return None if it is not measured."""
        facts, small = op.facts, 0
        counted = facts.zeros(value, self.limit)
        known = None if counted is None else self._without_zeros(op, which, value)
        if counted is not None and known is not None and not (counted[0] and known.order):
            (order, shape, counts), small = known, counted[1]
            if counted[0]:  # Of no matrix, so that nothing else is counted.
                counts = counts._replace(numbers=(counted[0], *counts.numbers[1:]))
        else:
            try:
                found = readable(facts, value)
            except NotReadableError as problem:
                self._notes.setdefault(f"not measured: {problem}")
                return None
            if found is None or 0 in found[0].shape:
                return None
            x, arithmetic, at_once = found
            shape, order = x.shape, op.order(which, len(x.shape))
            counts = count(arithmetic, x, order, self.block, self.limit, at_once, counted)
        version = facts.version(value) if which[0] == "output" else None
        return _Made(version, order, shape, counts, small)

    def _without_zeros(self, op: _Op, which: tuple[str, int], value: Any) -> _Full | None:
        """Return the counts of a tensor if none of it is zero, without looking; None if its driver
        does not compute.
        """
        shape: Any = op.facts.shape(value)
        known = op.full.get((which, shape))
        if known is None and op.facts.arithmetic is not None and 0 not in shape:
            order = op.order(which, len(shape))
            counts = without_zeros(op.facts.arithmetic, shape, order, self.block)
            known = op.full[which, shape] = _Full(order, shape, counts)
        return known

    def _multiply(
        self, op: _Op, given: dict[int, Counts], sizes: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        left, right = (given.get(position) for position in op.operands)
        if left is None or right is None or op.formula is None:
            return
        try:
            macs = op.formula.count(sizes, tuple(size_of(op.facts, output) for output in outputs))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # The formula does not support these shapes. Measuring never ends a program.
            self._notes.setdefault(f"MACs of {op.about.name} are not known: {error}"[:200])
            return
        if op.product is None:
            op.product = _Product(Product(**vars(op.about)), op.even)
        arithmetic = left.arithmetic
        if right.arithmetic is not arithmetic and op.facts.arithmetic is not None:
            arithmetic = op.facts.arithmetic  # One of both was counted by NumPy.
        op.product.add(left, right, macs, arithmetic)


class _Full(NamedTuple):
    """Counts of a tensor without zeros, and the order in which it is read."""

    order: Order | None
    shape: Sequence[int]
    counts: Counts


class _Made(NamedTuple):
    """Counts of a value at one tensor version, read in one order.

    Attributes:
        small: How many small elements there are besides those in `counts`, which all tensors of
            this shape without zeros share.
    """

    version: int | None
    order: Order | None
    shape: Sequence[int]
    counts: Counts
    small: int


class _Tensor:
    """Sums the counts of one tensor of one operator, on the tensor's device."""

    def __init__(self, facts: MeasuredTensor, tensors: Facts) -> None:
        self._facts, self._tensors = facts, tensors
        self._numbers: Sequence[Any] = (0,) * len(NUMBERS)
        self._channels: Any = None
        #: Small elements that are not in `_numbers`.
        self._small = 0
        #: The last counts if they are plain numbers, and how often they came again since then.
        self._last: Counts | None = None
        self._repeats = 0

    def add(self, made: _Made) -> None:
        """Add one execution."""
        counts = made.counts
        self._small += made.small
        if counts is self._last:
            self._repeats += 1
            return
        self._add_repeats()
        self._last = counts if counts.is_plain else None
        facts = self._facts
        facts.shape = list(map(int, made.shape))
        facts.executions += 1
        facts.elements += counts.elements
        facts.blocks += counts.blocks
        facts.groups += counts.groups
        self._numbers = tuple(map(add, self._numbers, counts.numbers))
        if facts.executions == 1:
            facts.channels, self._channels = counts.width, counts.channels
        elif counts.width != facts.channels:
            facts.channels, self._channels = 0, None  # They are not the same channels.
        elif counts.width:
            both = self._channels, counts.channels
            if len({type(one) for one in both} - {int}) > 1:
                # Executions may have several dtypes, of which NumPy counts only some.
                asarray = numpy_arithmetic().module.asarray
                both = tuple(asarray(to_list(self._tensors, one)) for one in both)
            self._channels = both[0] + both[1]

    def _add_repeats(self) -> None:
        facts, counts, repeats = self._facts, self._last, self._repeats
        self._repeats = 0
        if counts is not None and repeats:
            facts.executions += repeats
            facts.elements += repeats * counts.elements
            facts.blocks += repeats * counts.blocks
            facts.groups += repeats * counts.groups
            more = (repeats * number for number in counts.numbers)
            self._numbers = tuple(map(add, self._numbers, more))
            if counts.width and counts.width == facts.channels:
                self._channels = self._channels + repeats * counts.channels

    def facts(self) -> MeasuredTensor:
        """Return the sums so far."""
        self._add_repeats()
        numbers: dict[str, Any] = dict(zip(NUMBERS, map(int, self._numbers), strict=True))
        numbers["small"] += self._small
        # If all channels have as many elements, none is dead.
        counted = self._channels is not None and not isinstance(self._channels, int)
        alive = to_list(self._tensors, self._channels) if counted else []
        dead = [index for index, number in enumerate(alive) if not number]
        return replace(self._facts, **numbers, dead=dead)


class _Product:
    """Sums the effective MACs of one operator, on the device of its operands.

    Args:
        facts: The operator.
        even: Whether the operator uses each element of its left operand equally often.
    """

    def __init__(self, facts: Product, even: bool) -> None:
        self._facts, self._even = facts, even
        self._sums: Sequence[Any] = (0.0, 0.0, 0.0)

    def add(self, left: Counts, right: Counts, macs: int, arithmetic: Arithmetic) -> None:
        """Add one execution."""
        self._facts.executions += 1
        self._facts.macs += macs

        def real(number: Any) -> Any:
            is_plain = isinstance(number, int)
            return float(number) if is_plain else arithmetic.astype(number, "float64")

        there = real(left.filled), real(right.filled)
        pairs = left.elements * right.elements
        if left.width and left.width == right.depth:
            # Elements are multiplied by the weights of the same channel only.
            products = left.channels * right.inner
            if isinstance(left.channels, int):
                products = left.channels * right.filled
            elif isinstance(right.inner, int):
                products = left.filled * right.inner
            else:
                products = arithmetic.sum(products)
            both = real(products) * (macs * left.width / pairs)
            self._facts.exact &= self._even
        else:
            both = there[0] * there[1] * (macs / pairs)
            self._facts.exact = False
        new = there[1] * (macs / right.elements), there[0] * (macs / left.elements), both
        self._sums = tuple(map(add, self._sums, new))

    def facts(self) -> Product:
        """Return the sums so far."""
        by_weight, by_input, by_both = (round(float(number)) for number in self._sums)
        return replace(self._facts, by_weight=by_weight, by_input=by_input, by_both=by_both)


class _Op:
    """An operator that is being measured.

    Args:
        context: Its context.
        channels: Where the channels are in a tensor of unknown layout.
    """

    def __init__(self, context: OpContext, channels: str) -> None:
        self.about = OpFacts.of(context)
        self.facts = facts_of(context)
        self.weights = WeightKeys(context)
        #: Kind, position, and key of the weight -> sums.
        self.tensors: dict[tuple[str, int, str | None], _Tensor] = {}
        #: Kind, position and shape of a tensor -> what is counted if none of it is zero.
        self.full: dict[tuple[tuple[str, int], Sequence[int]], _Full] = {}
        self.product: _Product | None = None
        self.eager = is_eager(context.namespace)
        #: Thread -> counts by position, and sizes, of the inputs of the execution that it is in.
        self.entered: dict[int, tuple[dict[int, Counts], Sequence[Any] | None]] = {}
        word, roles = context["type"], context.get("input_roles", ())
        self._names = [*roles, *context.input_names[len(roles) :]]
        self._channels = "last" if word in _LAST else channels
        self._layout: str | None = context.get("layout")
        self._weight_layout: str | None = context.get("weight_layout")
        #: Position of the right operand, and whether it is a weight.
        self._right = next((roles.index(r) for r in ("weight", "right") if r in roles), None)
        self._is_weight = self._right is not None and (
            roles[self._right] == "weight"
            or (word in _PRODUCTS and context.value(self._right) is not None)
        )
        if word == "matmul" and self._weight_layout is None:
            self._weight_layout = "IO"
        formula = formula_of(word, context) if word in _PRODUCTS else None
        self.formula = formula if isinstance(formula, Formula) else None
        self.operands = self.formula.inputs[:2] if self.formula is not None else ()
        # A formula that goes by the input, such as that of transposed convolutions, uses each
        # element equally often.
        turned = any(context.attrs.get(name) for name in ("transpose_a", "adj_x"))
        self.even = (
            not turned and word is not None and not word.startswith(("conv1", "conv2", "conv3"))
        )

    def order(self, which: tuple[str, int], rank: int) -> Order | None:
        """Return how a tensor of the op is read as a matrix."""
        layout = self._weight_layout
        if which == ("input", self._right) and layout is not None and rank == len(layout):
            return order_of_weight(layout)
        first = self._channels == "first"
        if self._channels == "auto":
            first = self.facts.channels_first and rank in (4, 5)
        return order_of(rank, self._layout, first)

    def sizes(self, positions: Sequence[int], values: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the sizes that the formula needs; None without a formula or if one is missing."""
        if self.formula is None:
            return None
        given = dict(zip(positions, values, strict=True))
        try:
            return tuple(size_of(self.facts, given[place]) for place in self.formula.inputs)
        except (KeyError, ValueError):
            return None

    def new_tensor(self, kind: str, position: int, weight: str | None) -> MeasuredTensor:
        """Create the record of a tensor that is measured for the first time."""
        name = str(position)
        if kind == "input" and position < len(self._names):
            name = self._names[position]
        if kind == "input" and position == self._right:
            multiplies = self._is_weight or (weight is not None and self.about.word in _PRODUCTS)
            kind = "weight" if multiplies else kind
        return MeasuredTensor(**vars(self.about), kind=kind, tensor=name, shape=[], weight=weight)
