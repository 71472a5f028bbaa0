"""`Summary`: list the modules of a model with output shapes, parameters and MACs of one pass.

Decides what belongs to the first forward pass. The costs of operators are those of `flops`, the
tree of modules is in `result`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from amanda_core import OpContext
from amanda_core.engine.calls import Call
from amanda_core.interface.facts import Facts
from amanda_core.runtime.weak import Known
from amanda_core.weights.reads import Reads
from amanda_tools.flops.formulas import Formula, counted
from amanda_tools.flops.operators import formula_for, library_formulas, rules
from amanda_tools.kit.operators.entries import program_key_of, with_parents
from amanda_tools.kit.operators.tool import OperatorTool, is_eager
from amanda_tools.kit.tensors.types import sizes_at
from amanda_tools.kit.tensors.values import facts_of, tensors_in
from amanda_tools.kit.weights.parameters import ModelParameters
from amanda_tools.summary.result import Model, SummaryResult

__all__ = ["Summary"]


class Summary(OperatorTool["_Op"]):
    """Lists modules with class, output shape, parameters and MACs of one forward pass.

    A pass is the first call of an outermost module. Where a framework does not report calls, as in
    graphs, it is the first execution of each operator.

    Args:
        depth: How many levels of modules the table shows; 0 for all.

    Raises:
        ValueError: `depth` is negative.

    >>> tool = Summary(depth=2)
    """

    figures: ClassVar[Mapping[str, str]] = {"parameters": "", "macs": ""}

    by_example = True  # Formulas are of the shapes of one.

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        if depth < 0:
            raise ValueError(f"depth must not be negative, but is {depth}")
        self.depth = depth
        self.formulas = library_formulas()
        #: Root label as operators read it -> its model.
        self._models: dict[str, Model] = {}
        #: Parameters that were read outside of any model.
        self._nameless: Known[tuple[ModelParameters, str]] = Known()
        #: Names of outermost modules whose first call has ended.
        self._done: set[str] = set()
        #: Name of an outermost module whose calls are not reported -> whether it has run.
        self._begun: dict[str, bool] = {}
        #: Name of an outermost module -> the namespace in which it ran first.
        self._first: dict[str, str] = {}
        self.depends_on(rules())
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)
        self.add_inst_for_call(end=self._end_call)

    def analyse(self, context: OpContext) -> None:
        """Record the parameters of the model, and insert a routine that reads input sizes."""
        if not self.is_wanted(context):
            return
        with self._clock, self._lock:
            reads = context.weights
            outermost = reads.root or [*with_parents(context.module_path), ""][1]
            if not self._is_first(outermost, context):
                return
            model = self._models.get(reads.root)
            if model is None:
                model = self._models[reads.root] = Model(reads.root, self._nameless)
            model.add(reads, context.module_path)
            formula = formula_for(context, self.formulas)
            op = self._op_of(context)
            op.model, op.module, op.outermost = model, context.module_path, outermost
            op.repeats, op.passes_on = is_eager(context.namespace), _passes_on(reads)
            op.calls_end_passes = _has_calls(context) and bool(outermost)
            if op.repeats and not op.calls_end_passes and outermost not in self._begun:
                self._begun[outermost] = False
                context.insert_before_op(self.begin, observe=True, inputs=[], outermost=outermost)
            if isinstance(formula, str):
                op.problem = f"{context['type'] or context.op_type}: {formula}"
            elif formula is not None and formula.kind == "matmul":
                op.formula = formula
                # Not that of an operator without a cost, such as one that initializes a weight.
                self._first.setdefault(outermost, context.namespace)
                if formula.inputs:
                    context.insert_before_op(self.enter, observe=True, inputs=formula.inputs, op=op)

    def analyse_outputs(self, context: OpContext) -> None:
        """Record the output of the operator's module, and insert a routine that counts."""
        op = self._ops.get(program_key_of(context))
        if op is None or op.model is None:
            return
        with self._clock, self._lock:
            outputs = context.get_outputs() or ()
            found = next((value for _, value in tensors_in(op.tensors, outputs)), None)
            if found is not None and not op.passes_on and op.outermost not in self._done:
                dtype = op.tensors.dtype(found)
                op.model.show(op.module, op.tensors.shape(found), dtype)
                if op.problem is not None and ("float" in dtype or "complex" in dtype):
                    op.model.not_counted[op.problem] = None
            if op.formula is not None:
                context.insert_after_op(self.leave, observe=True, op=op)

    def begin(self, outermost: str) -> None:
        """End the first pass if its first operator runs again: nothing else tells its end."""
        with self._lock:
            if self._begun[outermost]:
                self._done.add(outermost)
                self._notes.setdefault("a pass ends where its first operator runs again")
            self._begun[outermost] = True

    def enter(self, *inputs: Any, op: _Op) -> None:
        """Record the sizes of the inputs of an execution of the first pass."""
        if self._counts(op):
            with self._clock:
                sizes = sizes_at(op.tensors, inputs, range(len(inputs)))
                op.entered[threading.get_ident() if op.repeats else 0] = sizes

    def leave(self, *outputs: Any, op: _Op) -> None:
        """Add the cost of an execution of the first pass."""
        if not self._counts(op):
            return
        with self._clock, self._lock:
            assert op.formula is not None
            assert op.model is not None
            inputs: tuple[Any, ...] | None = ()
            if op.formula.inputs:
                inputs = op.entered.pop(threading.get_ident() if op.repeats else 0, None)
            made = sizes_at(op.tensors, outputs, range(len(outputs)))
            number: int | str = "a shape is not known"
            if inputs is not None and made is not None:
                number = counted(op.formula.count, inputs, made)
            op.ran = True
            if isinstance(number, str):
                op.model.not_counted[number] = None
            else:
                op.model.count(op.module, number)

    def result(self) -> SummaryResult:
        """Return the summary of what has run so far."""
        with self._lock:
            return SummaryResult.of(
                list(self._models.values()),
                self.depth,
                tool_seconds=self._clock.spent / 1e9,
                wall_seconds=self._clock.wall / 1e9,
                notes=list(self._notes),
            )

    def _op_of(self, context: OpContext) -> _Op:
        return self._ops.setdefault(program_key_of(context), _Op(facts_of(context)))

    def _is_first(self, outermost: str, context: OpContext) -> bool:
        """Return True if an operator that is analysed now belongs to the first pass."""
        if outermost in self._done:
            return False
        return _has_calls(context) or self._first.get(outermost, context.namespace) == (
            context.namespace
        )

    def _counts(self, op: _Op) -> bool:
        """Return True if an execution that runs now belongs to the first pass."""
        return op.outermost not in self._done and (op.repeats or not op.ran)

    def _end_call(self, call: Call) -> None:
        with self._lock:
            self._done.add(call.module)


class _Op:
    def __init__(self, tensors: Facts) -> None:
        self.tensors = tensors
        self.formula: Formula | None = None
        self.problem: str | None = None
        self.model: Model | None = None
        self.module = self.outermost = ""
        #: Whether several executions may belong to one pass, and whether the end of a call of the
        #: outermost module ends it.
        self.repeats = self.calls_end_passes = False
        #: Whether it only hands a parameter on, so that its output is not that of a module.
        self.passes_on = False
        self.ran = False
        #: Thread -> sizes of the inputs of its current execution.
        self.entered: dict[int, tuple[Any, ...] | None] = {}


def _has_calls(context: OpContext) -> bool:
    return context.supports("calls") and is_eager(context.namespace)


def _passes_on(reads: Reads) -> bool:
    return bool(reads) and not reads.consumed
