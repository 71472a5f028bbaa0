"""`Flops`: count the multiply-accumulates of a program, forward and backward.

Decides what is counted when. The costs of operators are in `formulas` and `operators`, the result
is in `result`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from amanda_core import OpContext
from amanda_core.engine.calls import Call
from amanda_core.interface.facts import Facts
from amanda_core.interface.vocabulary import backward_type_of
from amanda_core.runtime.weak import Known
from amanda_tools.flops.formulas import Count, Formula, counted
from amanda_tools.flops.operators import APART, formula_for, library_formulas, rules
from amanda_tools.flops.result import CountedOp, FlopsResult
from amanda_tools.flops.units import Units
from amanda_tools.kit.operators.entries import key_of
from amanda_tools.kit.operators.tool import OperatorTool, is_eager
from amanda_tools.kit.operators.weights import WeightKeys
from amanda_tools.kit.tensors.types import is_floating, size_of, sizes_at
from amanda_tools.kit.tensors.values import facts_of, tensors_in
from amanda_tools.kit.weights.parameters import ModelParameters

__all__ = ["Flops"]

Kind = Literal["matmul", "norm", "elementwise"]


class Flops(OperatorTool["_Op"]):
    """Counts multiply-accumulates (MACs) and floating-point operations, forward and backward.

    One MAC is two FLOPs. Only what is executed counts: with the shapes of each execution, and
    backward only the gradients that are computed. Operators without a formula are listed.

    Args:
        include: What to count: ``matmul`` for matrix products, convolutions, attention and
            recurrent layers, ``norm`` for normalization, ``elementwise`` for the rest. The default
            is ``matmul``.
        causal: ``full`` counts causal attention like any other attention, ``half`` counts half of
            it.
        backward: Count the gradients as well.
        everything: Include operators outside the model, such as those of an optimizer.
        formulas: Type of an operator, or a common type -> formula of one's own, which comes before
            others: ``(sizes of the inputs, sizes of the outputs) -> multiply-accumulates``. An
            input that is not a tensor has None in place of a size. Libraries have formulas by the
            entry point ``amanda.flops``, and operators of `torch.library` by PyTorch's registry.
        batch: How many samples a batch has, for the cost of one. Without it, this is the first axis
            of the first tensor that an outermost module is called with.

    Raises:
        ValueError: An option has an invalid value.

    >>> tool = Flops(include=["matmul", "norm"])
    """

    by_example = True  # Formulas are of the shapes of one.
    figures = dict.fromkeys(
        ("total", "forward", "backward", "macs", "step", "pass", "sample", "not_counted"), ""
    )

    def __init__(
        self,
        include: list[Kind] | None = None,
        causal: Literal["full", "half"] = "full",
        backward: bool = True,
        everything: bool = False,
        formulas: Mapping[str, Count] | None = None,
        batch: int | None = None,
    ) -> None:
        super().__init__(everything)
        kinds = ["matmul"] if include is None else list(include)
        for kind in kinds:
            if kind not in ("matmul", "norm", "elementwise"):
                raise ValueError(f"include must be of matmul, norm and elementwise, not {kind!r}")
        if causal not in ("full", "half"):
            raise ValueError(f"causal must be full or half, but is {causal!r}")
        if batch is not None and batch < 1:
            raise ValueError(f"batch must be at least 1, but is {batch}")
        self.include = frozenset(kinds)
        self._units = Units(batch)
        self.causal = causal
        self.backward = backward
        self.formulas = {**library_formulas(), **(formulas or {})}
        #: Backward operators of graphs by name, until they run.
        self._requested: dict[str, _Op] = {}
        self._models: dict[str, ModelParameters] = {}
        #: Parameters that were read outside of any model.
        self._nameless: Known[tuple[ModelParameters, str]] = Known()
        self.depends_on(rules())
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)
        #: Whether backward operators are analysed, each of which costs as much as a forward one.
        self._analyses_backward = False
        self.add_inst_for_call(self._begin_call, self._end_call, needed=False)
        self.add_inst_for_step(end=self._end_step)

    def analyse(self, context: OpContext) -> None:
        """Find the formula of an operator and insert routines that record its input sizes."""
        if not self.is_wanted(context):
            return
        if self.backward and context.get(APART) and not self._analyses_backward:
            self._analyses_backward = True
            self.add_inst_for_op(self.analyse_backward, backward=True)
        with self._clock:
            reads = context.weights
            model = self._models.setdefault(reads.root, ModelParameters(reads.root, self._nameless))
            model.add(reads, context.module_path)
            op = self._op_of(context)
            if op is None or op.formula is None:
                return
            formula = op.formula
            op.read = _bytes(op.tensors, context.get_inputs())
            if formula.inputs:
                # Another graph may run the same operator with other shapes.
                context.insert_before_op(self.enter, observe=True, inputs=formula.inputs, op=op)
            if self._watches_gradients(context):
                if not context.supports("late_gradients"):
                    self._watch_arrival(context, op)
                inputs = context.get_inputs() or ()
                operands = () if formula.whole else formula.operands or range(len(inputs))
                for position in operands:
                    if is_floating(op.tensors, inputs[position]):
                        # One by one: requested together, all of them would be computed.
                        context.insert_after_backward_op(
                            self.operand,
                            observe=True,
                            grad_inputs=[position],
                            op=op,
                            position=position,
                        )

    def analyse_outputs(self, context: OpContext) -> None:
        """Insert a routine that counts the executions of an operator."""
        op = self.known(context)
        if op is None:
            return
        with self._clock:
            outputs = context.get_outputs() or ()
            if op.formula is None:
                # Operators without a floating-point output are not arithmetic worth reporting.
                if any(is_floating(op.tensors, value) for value in outputs):
                    context.insert_after_op(self.uncounted, observe=True, outputs=[], op=op)
                else:
                    with self._lock:
                        del self._ops[key_of(context)]
                return
            written = _bytes(op.tensors, outputs)
            if op.facts.moved is None and op.read is not None and written is not None:
                op.facts.moved = op.read + written
            late = context.supports("late_gradients")
            if outputs and late and self._watches_gradients(context):
                self._watch_arrival(context, op)
            if not op.eager:
                inputs = sizes_at(op.tensors, context.get_inputs(), op.formula.inputs)
                made = sizes_at(op.tensors, outputs, range(len(outputs)))
                op.static = None if inputs is None or made is None else (inputs, made)
            context.insert_after_op(self.leave, observe=True, op=op)

    def _watches_gradients(self, context: OpContext) -> bool:
        """Return True if gradients are counted where they arrive at a forward operator."""
        if not self.backward or context.get(APART):
            return False
        if context.supports("aligned_gradients"):
            return True
        self._notes.setdefault(f"gradients are not counted on {context.namespace}")
        return False

    def _watch_arrival(self, context: OpContext, op: _Op) -> None:
        context.insert_before_backward_op(self.arrival, observe=True, grad_outputs=[0], op=op)

    def analyse_backward(self, context: OpContext) -> None:
        """Insert a routine that counts a backward operator, if each gradient has one of its own."""
        forward = context.forward
        if forward is None or not forward.get(APART):
            return
        op = self.known(forward)
        word = forward["type"]
        if op is None or op.formula is None or not isinstance(word, str):
            return
        if context["backward_type"] == backward_type_of(word):
            self._requested[context.name] = op
            context.insert_after_backward_op(
                self.gradient, observe=True, grad_inputs=[], op=op, name=context.name
            )

    def enter(self, *inputs: Any, op: _Op) -> None:
        """Record the sizes of the inputs of one execution."""
        with self._clock:
            op.entered[threading.get_ident() if op.eager else 0] = sizes_at(
                op.tensors, inputs, range(len(inputs))
            )

    def leave(self, *outputs: Any, op: _Op) -> None:
        """Count one execution."""
        with self._clock, self._lock:
            thread = threading.get_ident() if op.eager else 0
            inputs = op.entered.get(thread) if op.formula and op.formula.inputs else ()
            if inputs is None and op.static is not None:
                inputs, _ = op.static  # Programs for several devices call routines in any order.
            op.forward(inputs, sizes_at(op.tensors, outputs, range(len(outputs))))

    def arrival(self, gradient: Any, op: _Op) -> None:
        """Find the execution that is being differentiated."""
        with self._clock, self._lock:
            op.begin(gradient)

    def operand(self, gradient: Any, op: _Op, position: int) -> None:
        """Count the gradient of one operand."""
        with self._clock, self._lock:
            if _tensors(gradient):
                op.backward(position, gradient)

    def gradient(self, op: _Op, name: str) -> None:
        """Count one execution of a backward operator that computes one gradient."""
        with self._clock, self._lock:
            self._requested.pop(name, None)
            op.backward_operator()

    def uncounted(self, op: _Op) -> None:
        """Record one execution of an operator without a formula."""
        with self._lock:
            op.facts.calls += 1

    def result(self) -> FlopsResult:
        """Return what has been counted so far."""
        with self._lock:
            ops = [
                op.facts for op in self._ops.values() if op.facts.calls or op.facts.backward_calls
            ]
            return FlopsResult(
                sorted(self.include),
                self.causal,
                [CountedOp(**vars(facts)) for facts in ops],
                tool_seconds=self._clock.spent / 1e9,
                wall_seconds=self._clock.wall / 1e9,
                notes=[*self._notes, *self._not_run()],
                step=self._units.step(),
                passes=self._units.passes(),
                parameters=self._parameters(),
            )

    def _parameters(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for model in self._models.values():
            found.update(model.by_module())
        return dict(found)

    def _begin_call(self, call: Call) -> None:
        with self._lock:
            self._units.begin_call()

    def _end_call(self, call: Call) -> None:
        with self._lock:
            self._units.end_call(call)

    def _end_step(self, number: int) -> None:
        with self._lock:
            self._units.end_step()

    def _not_run(self) -> list[str]:
        """Describe the gradients that a graph requests and does not compute."""
        ran = [name for name, op in self._requested.items() if op.facts.calls]
        if not ran:
            return []
        several = f" and {len(ran) - 1} more" if len(ran) > 1 else ""
        return [f"not counted, as the graph does not compute it: {ran[0]}{several}"]

    def _op_of(self, context: OpContext) -> _Op | None:
        """Return the account of an operator, or None if it costs nothing or is not requested."""
        word = context["type"]
        problem = None
        formula = formula_for(context, self.formulas)
        if isinstance(formula, str):
            formula, problem = None, formula
        elif formula is None or formula.kind not in self.include:
            return None
        if formula is not None and formula.whole and self.include != {"matmul"}:
            self._notes.setdefault("inside TorchScript only products are counted")
        facts = CountedOp.of(context, problem=problem, weights=[*WeightKeys(context)])
        halved = self.causal == "half" and word == "attention" and _is_causal(context)
        op = self.account_of(context, lambda: _Op(facts, facts_of(context), self._units))
        op.formula, op.halved = formula, halved
        return op


class _Op:
    def __init__(self, facts: CountedOp, tensors: Facts, units: Units) -> None:
        self.facts, self.tensors, self.units = facts, tensors, units
        self.formula: Formula | None = None
        self.halved = False
        self.eager = is_eager(facts.namespace)
        #: Bytes of the inputs of the first execution; None if not known.
        self.read: int | None = None
        #: Sizes of inputs and outputs in the graph that was analysed.
        self.static: tuple[Any, Any] | None = None
        #: Thread -> sizes of the inputs of its current execution.
        self.entered: dict[int, tuple[Any, ...] | None] = {}
        #: Gradients that arrived for the execution now being differentiated, by position.
        self.arrived: dict[int, Any] = {}
        self.execution: tuple[Any, Any] | None = None
        #: The last distinct sizes of inputs and outputs, the newest last.
        self.seen: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def forward(self, inputs: tuple[Any, ...] | None, outputs: tuple[Any, ...] | None) -> None:
        self.facts.calls += 1
        if inputs is None or outputs is None:
            self.facts.problem = "a shape is not known"
            return
        assert self.formula is not None
        number = self._number(self.formula.count, inputs, outputs)
        if number is None:
            return
        if len(self.seen) != 1 or inputs not in self.seen:
            self.seen.pop(inputs, None)
            if len(self.seen) == _SEEN:
                del self.seen[next(iter(self.seen))]
        self.seen[inputs] = (inputs, outputs)
        self._add(number, "")

    def backward_operator(self) -> None:
        assert self.formula is not None
        self.facts.backward_calls += 1
        execution = self._execution_of(None)
        if execution is not None:
            self._add(self._number(self.formula.count, *execution), "backward_", self.formula.each)

    def begin(self, gradient: Any) -> None:
        """Start counting the gradients of an execution; `gradient` is that of the first output."""
        self.arrived, self.execution = {}, self._execution_of(gradient)
        whole = self.formula.whole if self.formula is not None else None
        if whole is not None and self.execution is not None:
            self.facts.backward_calls += 1
            self._add(self._number(whole, *self.execution), "backward_")

    def backward(self, position: int, gradient: Any) -> None:
        """Count the gradient of one operand. The gradients of one execution arrive one after
        another.
        """
        formula = self.formula
        assert formula is not None
        execution = self.execution or self._execution_of(None)
        if execution is None:
            return
        if not self.arrived:
            self.facts.backward_calls += 1
        before = dict(self.arrived)
        self.arrived[position] = (
            [None if item is None else True for item in gradient]
            if isinstance(gradient, (list, tuple))
            else True
        )
        if formula.backward is None or formula.operands is None:
            number = self._number(formula.count, *execution)
            self._add(number, "backward_", _tensors(gradient))
            return
        # The cost of all gradients so far, minus what was counted before this one.
        costs = [
            self._number(formula.backward, *execution, [given.get(p) for p in formula.operands])
            for given in (self.arrived, *([before] if before else []))
        ]
        if None not in costs:
            self._add((costs[0] or 0) - sum(cost or 0 for cost in costs[1:]), "backward_")

    def _execution_of(self, gradient: Any) -> tuple[Any, Any] | None:
        """Return the sizes of the latest execution that fits the gradient of an output."""
        if not self.seen:
            # A graph may compute a gradient without running the operator itself.
            if self.static is None:
                self.facts.problem = self.facts.problem or "a gradient came before the operator ran"
            return self.static
        newest = next(reversed(self.seen.values()))
        if len(self.seen) == 1 or gradient is None:
            return newest
        try:
            size = size_of(self.tensors, gradient)
        except ValueError:
            return newest
        fitting = (pair for pair in reversed(self.seen.values()) if pair[1][0] == size)
        return next(fitting, newest)

    def _number(self, count: Callable[..., int], *given: Any) -> int | None:
        number = counted(count, *given)
        if isinstance(number, str):
            self.facts.problem = number
            return None
        return number // 2 if self.halved else number

    def _add(self, number: int | None, prefix: str, times: int = 1) -> None:
        if number is None:
            return
        assert self.formula is not None
        facts, number = self.facts, number * times
        macs = 0 if self.formula.kind == "elementwise" else number
        if prefix:
            facts.backward_macs += macs
            facts.backward_flops += number + macs
        else:
            facts.macs += macs
            facts.flops += number + macs
        self.units.add(macs, number + macs, bool(prefix))


#: Number of distinct sizes that one operator remembers for its gradients.
_SEEN = 64


def _bytes(facts: Facts, values: Sequence[Any] | None) -> int | None:
    """Return the size of all tensors in bytes, or None if one of them is unknown."""
    sizes = [facts.nbytes(tensor) for _, tensor in tensors_in(facts, values)]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _tensors(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(item is not None for item in value)
    return int(value is not None)


def _is_causal(context: OpContext) -> bool:
    names, inputs = context.input_names, context.get_inputs()
    return "is_causal" in names and bool(inputs and inputs[names.index("is_causal")] is True)
