"""`EffectivePath`: extract the neurons, synapses and weights that determine a prediction.

Decides what is recorded while a program runs, and when a run ends. `layers` has the layer rules,
`runs` converts runs to networks, `paths` extracts, and `result` has the result. NumPy is imported
only when needed. A little over 400 lines: one class.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path as FilePath
from typing import Any, Literal

from amanda_core import OpContext
from amanda_core.interface.facts import DENSE, SYMBOLIC, Facts
from amanda_core.results import load
from amanda_core.runtime.weak import Ref
from amanda_tools.effective_path.budget import Budget
from amanda_tools.effective_path.calls import Calls
from amanda_tools.effective_path.gathering import Gathered
from amanda_tools.effective_path.layers import BACKENDS, LAYER, rules
from amanda_tools.effective_path.model import Extraction, LayerRule, PathEnd, Variant
from amanda_tools.effective_path.network import Network
from amanda_tools.effective_path.paths import extract
from amanda_tools.effective_path.result import EffectivePathResult, Thresholds
from amanda_tools.effective_path.runs import Execution, Run, array_of
from amanda_tools.graph.values import EagerValues, Origin, Port, SymbolicValues
from amanda_tools.kit.operators.entries import key_of
from amanda_tools.kit.operators.tool import OperatorTool, is_eager
from amanda_tools.kit.operators.weights import WeightKeys
from amanda_tools.kit.tensors.types import dtype_of
from amanda_tools.kit.tensors.values import UNKNOWN, facts_of, need_numpy

__all__ = ["EffectivePath"]

_LOG = logging.getLogger("amanda.effective_path")


class EffectivePath(OperatorTool["_Op"]):
    """Extracts the effective path of each sample that goes through a network.

    Args:
        theta: Share of each sum that is kept, above 0 and at most 1.
        variant: ``cumulative`` (Qiu et al.), or one of the variants with thresholds ``BwCU``,
            ``BwAB`` and ``FwAB`` (Gan et al.); see `amanda_tools.effective_path.model.Extraction`.
        output_threshold: Threshold of the absolute values of outputs, for layers not in
            `thresholds`.
        term_threshold: Threshold of the terms of sums, for layers not in `thresholds`.
        thresholds: File of an earlier result whose thresholds are used.
        zeros: Whether a maximum pooling's output that is not positive has inputs.
        edges: Keep the edges and weights of paths as well.
        output: Pattern of the name of the operator at which paths start, such as ``*head/linear``;
            None for the last one that depends on a layer.
        start: Position of the token at which paths start, if the output has three axes: samples,
            tokens, and scores. Negative ones count from the end.
        until: What ends a run: leaving the outermost ``module``, or a ``step`` (of an optimizer, or
            `amanda.step`). In graphs each execution is a run.
        limit: Number of samples whose paths are kept.
        cost: How many times its own time a run may take with the tool, on average of those after
            the first. To keep to it, runs are left out, which the title counts: the second and
            third, to measure how long the program takes itself, and as many others as necessary.
            None to leave out none.

    Raises:
        ValueError: An option has an invalid value.
        TypeError: `start` is not a whole number.

    >>> tool = EffectivePath(theta=0.5)
    """

    whole = True
    changes_values = False
    works_on = tuple(f"{backend}/*/*" for backend in BACKENDS)

    def __init__(
        self,
        theta: float = 0.5,
        variant: Variant = "cumulative",
        output_threshold: float = 0.0,
        term_threshold: float = 0.0,
        thresholds: FilePath | None = None,
        zeros: bool = False,
        edges: bool = True,
        output: str | None = None,
        until: Literal["module", "step"] = "module",
        limit: int = 10_000,
        cost: float | None = 8.0,
        start: int = -1,
    ) -> None:
        need_numpy()
        super().__init__()
        self.result_is_final = True  # It ends the run that is being looked at.
        if until not in ("module", "step"):
            raise ValueError(f"until must be module or step, but is {until!r}")
        if limit < 0:
            raise ValueError(f"limit must not be negative, but is {limit}")
        if cost is not None and cost <= 1:
            raise ValueError(f"cost must be above 1, but is {cost}")
        known = {} if thresholds is None else _read(thresholds)

        def output_of(name: str) -> float:
            return known[name].output if name in known else output_threshold

        def term_of(name: str) -> float:
            return known[name].term if name in known else term_threshold

        self.how = Extraction(variant, theta, output_of, term_of, zeros, index(start))
        self.edges, self.output, self.until, self.limit = edges, output, until, limit
        self._run = Run()
        #: Number of an operator, and thread (0 in a graph) -> its current execution, and the input
        #: tensors with their versions.
        self._entered: dict[tuple[int, int], tuple[Execution, list[tuple[Ref, int]]]] = {}
        self._eager: dict[Facts, EagerValues] = {}
        self._symbolic = SymbolicValues(UNKNOWN)
        self._calls = Calls(self._symbol)
        self._serials = itertools.count()
        self._depth = 0
        self._gathered = Gathered()
        self._budget = Budget(self._clock, cost)
        #: Whether the log has said that runs are left out.
        self._cost, self._told = cost, False
        #: Whether an operator ran in a run that is left out.
        self._missed = False
        #: Operators at which paths end and that the log has named.
        self._logged: set[tuple[str, str]] = set()
        self.depends_on(rules())
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)
        self.add_inst_for_scope(self._enter_module, self._leave_module)
        self.add_inst_for_step(end=self._end_step)

    def analyse(self, context: OpContext) -> None:
        """Insert a routine that records the inputs of an operator."""
        if not self.is_wanted(context) or _is_gradient(context):
            return
        with self._clock, self._lock:
            inputs = context.get_inputs() or ()
            op = self._ops[key_of(context)] = _Op(context, next(self._serials))
            op.values = self._eager.setdefault(op.tensors, EagerValues(op.tensors))
            op.constant = frozenset(
                position
                for position, value in enumerate(inputs)
                if not isinstance(value, (list, tuple)) and context.value(position) is not None
            )
            if not op.is_eager:
                self._symbolic.facts = op.tensors
                op.program = self._calls.program_of(context.get_op().graph)
                op.inputs = [[self._symbol(item) for item in op.listed(value)] for value in inputs]
            context.insert_before_op(self.enter, observe=True, op=op)

    def analyse_outputs(self, context: OpContext) -> None:
        """Insert a routine that records the outputs of an operator."""
        op = self.known(context)
        if op is None:
            return
        with self._clock, self._lock:
            outputs = context.get_outputs() or ()
            if not op.is_eager:
                for position, value in enumerate(outputs):
                    if op.is_tensor(value):
                        self._symbolic.set(value, Origin(Port(op.number, position)))
            context.insert_after_op(self.leave, observe=True, op=op)

    def enter(self, *inputs: Any, op: _Op) -> None:
        """Record the inputs of one execution."""
        self._budget.begin()
        self._budget.routines += 1
        if self._budget.skips:
            self._missed = True
            return
        with self._clock, self._lock:
            listed = [op.listed(value) for value in inputs]
            ports = op.inputs
            if op.is_eager:
                ports = [[self._tensor(op, item) for item in items] for items in listed]
            execution = Execution(op.name, op.type, op.rule, ports, op.constant, program=op.program)
            made = self._run.made
            for items, own in zip(listed, ports, strict=False):
                # A reference to a variable that has no value yet is not given.
                for item, port in zip(items, own, strict=False):
                    if port not in made and op.is_fixed(item):
                        self._run.fixed.add(port)
            if op.rule is not None:
                self._note(execution, inputs, listed, op)
            # Weakly, since an operator that raises does not leave.
            versions = [
                (Ref(item), version)
                for item in (itertools.chain(*listed) if op.is_eager else ())
                if (version := op.tensors.version(item)) is not None
            ]
            self._entered[op.number_here()] = execution, versions

    def leave(self, *outputs: Any, op: _Op) -> None:
        """Record the outputs of one execution."""
        self._budget.routines += 1
        if self._budget.skips:
            return
        with self._clock, self._lock:
            entered = self._entered.pop(op.number_here(), None)
            if entered is None:
                return
            execution, versions = entered
            number = next(self._serials) if op.is_eager else op.number
            for reference, before in versions:
                item = reference()
                if item is not None and op.tensors.version(item) != before:
                    self._note_write(op, item, number)
            for position, value in enumerate(outputs):
                if op.is_eager:
                    for item in op.listed(value):
                        op.values.set(item, Origin(Port(number, position)))
            execution.outputs = [Port(number, position) for position in range(len(outputs))]
            self._run.made.update(execution.outputs)
            if outputs and op.is_tensor(outputs[0]):
                execution.output = Port(number, 0)
                for port, value in zip(execution.outputs, outputs, strict=True):
                    if op.rule is not None and (port == execution.output or op.splits):
                        self._keep(op, port, value)
            execution.order = number
            self._run.executions.append(execution)

    def result(self) -> EffectivePathResult:
        """Return the paths so far; executions since the end of the last run count as a run."""
        with self._lock:
            self._end_run()
            return self._gathered.result(self.how, self._clock, self._budget, list(self._notes))

    # Inside.

    def why_unsupported(self, context: OpContext) -> str | None:
        """Return why paths cannot be followed in the namespace of this context, or None if they
        can.
        """
        why = super().why_unsupported(context)
        if why is not None:
            return why
        backend = context.namespace.partition("/")[0]
        if backend not in BACKENDS:
            return "there are no rules for its operators"
        known = is_eager(context.namespace) or backend == "tensorflow"
        return None if known else "its graphs cannot be read"

    def _note(
        self, execution: Execution, inputs: Sequence[Any], listed: Sequence[list[Any]], op: _Op
    ) -> None:
        assert op.rule is not None
        execution.given = dict(op.attrs)
        for position, value in enumerate(inputs):
            if position in op.rule.operands:
                for item, port in zip(listed[position], execution.ports([position]), strict=True):
                    self._keep(op, port, item)
                continue
            if op.reads_no_arrays and position != op.rule.weight:
                if op.tensors.is_tensor(value):
                    continue
                found = value
            else:
                found = array_of(op.tensors, value)
            if isinstance(value, tuple):
                found = tuple(array_of(op.tensors, item) for item in value)
            if position == op.rule.weight:
                execution.weight, execution.weight_key = found, op.weights.at(position)
            if position < len(op.names):
                execution.given[op.names[position]] = found

    def _keep(self, op: _Op, port: Port, value: Any) -> None:
        if port not in self._run.arrays and "float" in dtype_of(op.tensors, value):
            # Copy, because the next operator may work in place.
            self._run.arrays[port] = array_of(op.tensors, value)

    def _note_write(self, op: _Op, value: Any, number: int) -> None:
        """Record that an execution wrote an input; if it also returns it, it becomes its origin."""
        reason = "it wrote into memory that others share, which is not followed"
        self._run.writes[number] = PathEnd(op.name, op.type, reason)
        op.values.set_written(value, Origin(Port(number, None)))

    def _tensor(self, op: _Op, value: Any) -> Port:
        origin, written = op.values.find(value), op.values.find_write(value)
        # A tensor that was written by another operator than the one that returned it is new.
        if origin is None or written is not None:
            origin = Origin(Port(next(self._serials), 0))
            op.values.set(value, origin)
            # Only a write in this run ends paths; an earlier one happened before the input.
            if written is not None and written.port.node in self._run.writes:
                self._run.unseen[origin.port] = self._run.writes[written.port.node]
        return origin.port

    def _symbol(self, value: Any) -> Port:
        origin = self._symbolic.find(value)
        if origin is None:
            number = next(self._serials)
            for position, one in enumerate(value.op.outputs):
                if self._symbolic.find(one) is None:
                    self._symbolic.set(one, Origin(Port(number, position)))
            self._calls.meet(value.op)
            origin = self._symbolic.find(value)
            assert origin is not None
        return origin.port

    def _enter_module(self, path: str) -> None:
        if self._depth == 0 and self.until == "module":
            self._budget.begin()
        self._depth += 1
        self._budget.listeners += 1

    def _leave_module(self, path: str) -> None:
        self._depth -= 1
        self._budget.listeners += 1
        if self._depth == 0 and self.until == "module":
            with self._lock:
                self._end_run()

    def _end_step(self, number: int) -> None:
        with self._lock:
            self._end_run()

    def _end_run(self) -> None:
        run, self._run = self._run, Run()
        # Executions of eager operators that an exception has left.
        self._entered = {here: one for here, one in self._entered.items() if not here[1]}
        if run.executions:
            with self._clock:
                self._extract(run)
        skipped = self._budget.skips
        self._budget.end(bool(run.executions) or self._missed)
        self._missed = False
        if self._budget.skips and not skipped and not self._told:
            self._told = True
            _LOG.warning(
                "Some runs are left out, so that a run takes at most %g times its own time on "
                "average. To look at all of them, pass cost=None.",
                self._cost,
            )

    def _extract(self, run: Run) -> None:
        self._calls.link(run)
        network = Network(run, self.output, self.how.start)
        self._log(network)
        if network.logits is None:
            self._gathered.empty += bool(run.unseen or network.why)
            if network.why:
                self._gathered.reasons[network.why] = None
            return
        path = extract(network.nodes, network.values, network.logits, self.how)
        self._gathered.add(network, path, self.edges, self.limit, self._budget.runs, self.how.start)

    def _log(self, network: Network) -> None:
        """Log operators at which paths may end, once each and before paths are extracted."""
        new = {(end.name, end.reason): end for end in network.stops()}
        for key in self._logged:
            new.pop(key, None)
        self._logged.update(new)
        if new:
            # Layers that are equal end them alike.
            named = [f"{end.name} ({end.type}: {end.reason})" for end in new.values()]
            ends = ", ".join(named[:3])
            if len(new) > 3:
                ends += f" and {len(new) - 3} more, which the result lists"
            # Not a warning, which the program may have turned into an exception.
            _LOG.warning("Effective paths may end at %s. What is before is missing.", ends)


#: Kinds of rules that read no array but those of their operands and of the weight.
_READ_NO_ARRAYS = frozenset({"conv", "linear", "batch_norm", "reshape", "scale"})


class _Op:
    def __init__(self, context: OpContext, number: int) -> None:
        word = context["type"]
        self.number = number
        self.name, self.type = context.name, word if isinstance(word, str) else context.op_type
        self.rule: LayerRule | None = context.get(LAYER)
        self.splits = self.rule is not None and self.rule.kind == "split"
        self.reads_no_arrays = self.rule is not None and self.rule.kind in _READ_NO_ARRAYS
        self.is_eager = is_eager(context.namespace)
        self.tensors = facts_of(context)
        self.values: EagerValues
        self.names = context.input_names
        self.weights = WeightKeys(context)
        self.attrs: Mapping[str, Any] = dict(context.attrs)
        self.constant: frozenset[int] = frozenset()
        #: In a graph: its number, and the origins of the inputs.
        self.program: int | None = None
        self.inputs: list[list[Port]] = []

    def number_here(self) -> tuple[int, int]:
        """Return its number, and the thread that runs it now; 0 in a graph."""
        return self.number, threading.get_ident() if self.is_eager else 0

    def is_tensor(self, value: Any) -> bool:
        """Return True for a dense or symbolic tensor, which may come from an operator."""
        return (
            self.tensors.is_tensor(value)
            and self.tensors.layout(value) in (DENSE, SYMBOLIC)
            and self.tensors.is_own(value)
        )

    def listed(self, value: Any) -> list[Any]:
        """Return the tensors at a position."""
        if isinstance(value, (list, tuple)):
            return [item for item in value if self.is_tensor(item)]
        return [value] if self.is_tensor(value) else []

    def is_fixed(self, tensor: Any) -> bool:
        """Return True if a tensor that no operator produced is not an input: a variable or a
        number.
        """
        return "resource" in self.tensors.dtype(tensor) or self.tensors.shape(tensor) == ()


def _read(file: FilePath) -> dict[str, Thresholds]:
    found = load(file)
    if not isinstance(found, dict) or found.get("format") != "amanda.effective_path/1":
        raise ValueError(f"{str(file)!r} is not a result of effective paths")
    return {name: Thresholds(**pair) for name, pair in found["thresholds"].items()}


def _is_gradient(context: OpContext) -> bool:
    """Return True if the op passes values on in a TensorFlow function that computes gradients."""
    if not context.namespace.startswith("tensorflow/"):
        return False
    name = getattr(getattr(context.get_op(), "graph", None), "name", None)
    return isinstance(name, str) and name.startswith("__backward_")
