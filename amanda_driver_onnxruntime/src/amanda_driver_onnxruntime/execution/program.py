"""`Program`: runs the model of a session under tools.

Owns where the model is cut. Operators at which a tool acts, and those that are not analysed yet,
run one by one. What is between two of them stays one session.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import onnx
from onnx import external_data_helper

from amanda_core.driver_kit import (
    ForwardProgram,
    OpContext,
    OpRecord,
    Plan,
    Session,
    Step,
    several,
    standing_for,
)
from amanda_core.interface import IPoint, RoutineResultError, UnsupportedError
from amanda_driver_onnxruntime.execution.bodies import interpreter_of
from amanda_driver_onnxruntime.execution.parts import Parts, Values
from amanda_driver_onnxruntime.execution.routines import Done, Fragment, Host, Outcome, Staging
from amanda_driver_onnxruntime.execution.weaving import woven
from amanda_driver_onnxruntime.graphs import Graph, Model, Node
from amanda_driver_onnxruntime.onnxruntime_internals.sessions import Part
from amanda_driver_onnxruntime.onnxruntime_internals.values import OrtValue, array_of
from amanda_driver_onnxruntime.staging import NotStagedError

__all__ = ["Program"]


class _UnknownPlanError(Exception):
    """An operator has not run under the tools of now; the message names it."""


class Program:
    """The model of a session in one thread under tools.

    Args:
        model: The model.
        parts: The sessions of its parts.
        records: A record of each operator.
    """

    def __init__(self, model: Model, parts: Parts, records: Mapping[Node, OpRecord]) -> None:
        self.model, self.parts, self.records = model, parts, records
        self.staging = Staging(model.opset, model.prefix)
        #: Node -> the epoch in which it last ran, and its plans before and after with outcomes.
        self.plans: dict[Node, tuple[int, list[Done]]] = {}
        #: Epoch, the model with all edits, and the shapes of inputs that it is for; None for any.
        self._whole: tuple[int, Part | None, Any] = (0, None, None)
        self._lengths: Any = None
        #: Epoch, and the model with all values that routines look at as outputs; None if it is cut.
        self._watched: tuple[int, Part | None] = (0, None)
        #: Epoch in which no tool acted at any of its operators.
        self._idle_epoch = 0
        #: Whether a tool acted in the last run.
        self._acted = False

    def is_idle(self, session: Session) -> bool:
        """Return True if all operators are analysed and no tool acts at any."""
        if self._idle_epoch != session.epoch or not session.caching:
            if not all(record.is_idle(session) for record in self.records.values()):
                return False
            self._idle_epoch = session.epoch
        return True

    def run(
        self, session: Session, given: Mapping[str, Any], names: Sequence[str], run_options: Any
    ) -> list[Any]:
        """Run the model, and return the outputs of these names, of which it may hold memory."""
        values = Values(self.model, self.model.graph, run_options)
        for name, value in given.items():
            values.put(name, value)
        run, self._acted = _Run(self, session), False
        watched = None if self._sets_weights(given) else self._watching(session)
        if watched is None:
            run.graph(values)
        else:
            run.watched(watched, values)
        self._lengths = _lengths_of(given)
        return [values.ort(name) for name in names]

    def is_to_repeat(self, session: Session) -> bool:
        """Return True if the last run has only found that no tool acts anywhere."""
        return not (self._acted or self.model.is_random) and self.is_idle(session)

    def note_plans(self, node: Node, epoch: int, done: list[Done]) -> None:
        """Note the plans of a node that has run, if they have steps."""
        if any(plan for plan, _ in done):
            self.plans[node], self._acted = (epoch, done), True

    def whole(self, session: Session, given: Mapping[str, Any]) -> Part | None:
        """Return the model with all edits as one session; None if it must be cut.

        Args:
            session: The session of the tools.
            given: The inputs.
        """
        if not session.caching:
            return None
        epoch, found, lengths = self._whole
        if epoch != session.epoch:
            planned, lengths = partial(self._planned, session), None
            try:
                model, reads_shape = woven(self.model, planned, bakes=False)
                found = self.parts.made(model)
                lengths = self._lengths if reads_shape else None
            except _UnknownPlanError:
                return None  # It becomes known in this run.
            except Exception:  # What ONNX Runtime raises has no class in common.
                found = None
            self._whole = session.epoch, found, lengths
        if lengths is not None and lengths != _lengths_of(given):
            return None
        return None if self._sets_weights(given) else found

    def _sets_weights(self, given: Mapping[str, Any]) -> bool:
        """Return True if inputs stand for weights, which are constants of a session."""
        return bool(given.keys() & self.model.graph.weights.keys())

    def _watching(self, session: Session) -> Part | None:
        """Return the model as one session if all routines only look; None if it must be cut."""
        epoch, found = self._watched
        if epoch != session.epoch and session.caching:
            active = [node for node, record in self.records.items() if not record.is_idle(session)]
            try:
                done = [one for node in active for one in self._planned(session, node) or ()]
            except _UnknownPlanError:
                return None  # It becomes known in this run.
            looks = not any(
                plan.edits or any(step.action.tool.immediate for step in plan) for plan, _ in done
            )
            inside = not set(active) <= set(self.model.graph.nodes)
            found = self.parts.watched(active) if looks and not inside else None
            self._watched = session.epoch, found
        return found if session.caching else None

    def exported(self, session: Session) -> onnx.ModelProto:
        """Return the model with all edits, after a run.

        Raises:
            NotWovenError: A routine must run on the host.
            UnsupportedError: An operator has not run.
        """
        try:
            found, _ = woven(self.model, partial(self._planned, session), bakes=True)
        except _UnknownPlanError as error:
            raise UnsupportedError(
                "An operator has not run on the example inputs, so that it is not known what tools "
                "do there",
                where=str(error),
                fix="Give inputs for which it runs",
            ) from None
        # It may be written into any folder.
        external_data_helper.load_external_data_for_model(found, self.model.folder)
        return found

    def _planned(self, session: Session, node: Node) -> list[Done] | None:
        """Return the plans of a node before and after, with outcomes; None if it has none."""
        record = self.records.get(node)
        if record is None or record.is_idle(session):
            return None
        epoch, done = self.plans.get(node, (-1, []))
        if epoch != session.epoch:
            raise _UnknownPlanError(record.site.name)
        return done


class _Run:
    """One run of a model under tools."""

    def __init__(self, program: Program, session: Session) -> None:
        self.program, self.session = program, session

    def is_idle(self, node: Node) -> bool:
        """Return True if no tool acts at a node or inside it."""
        if not self.program.records[node].is_idle(self.session):
            return False
        return all(
            self.is_idle(inner)
            for body in (node.bodies.values() if node.is_open else ())
            for inner in body.nodes
        )

    def watched(self, part: Part, values: Values) -> None:
        """Run the model as one session, and then the routines, which only look, in order."""
        graph, parts, epoch = values.graph, self.program.parts, self.session.epoch
        try:
            found = part.run({name: values.ort(name) for name in part.inputs}, values.options)
        except Exception:  # What ONNX Runtime raises has no class in common.
            return self.graph(values)  # Routines see what ran before it is raised again.
        for name, value in zip(part.outputs, found, strict=True):
            if name not in graph.weights and name not in graph.inputs:
                values.put(name, value)
        for number, node in enumerate(graph.nodes):
            if not self.is_idle(node):
                _Execution(self, node, values, is_computed=True).execute_node()
            if self.session.epoch != epoch:  # A routine has changed the tools.
                parts.run_stretch(values, 0, number)
                return self.graph(values, number + 1)
        return None

    def graph(self, values: Values, first: int = 0) -> None:
        """Run the nodes of a graph from one of them on."""
        nodes, number = values.graph.nodes, first
        while number < len(nodes):
            last = number
            while last < len(nodes) and self.is_idle(nodes[last]):
                last += 1
            if last > number:
                self.program.parts.run_stretch(values, number, last)
                number = last
            else:
                _Execution(self, nodes[number], values).execute_node()
                values.drop(values.graph.dies[number])
                number += 1

    def body(self, around: Values, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
        """Run the graph inside a node, and return its outputs."""
        values = Values(self.program.model, graph, around.options, around)
        for name, value in zip(graph.inputs, inputs, strict=True):
            values.put(name, value)
        self.graph(values)
        return [values.ort(name) for name in graph.outputs]


class _Execution(ForwardProgram):
    """One execution of one operator under tools."""

    def __init__(self, run: _Run, node: Node, values: Values, is_computed: bool = False) -> None:
        model = weakref.ref(run.program.model)
        super().__init__(
            run.session,
            run.program.records[node],
            node.operator,
            attrs=node.attrs,
            constant=partial(_constant, model),
        )
        self._run, self._node, self._values, self._is_computed = run, node, values, is_computed
        self._given = [values.shown(name) if name else None for name in node.inputs]
        weights = {n for n in node.weights if values.weight(node.inputs[n]) is not None}
        #: Positions of what is the same in each execution; of what does not depend on inputs; and
        #: of what is a weight in the operator's part.
        self._constant, self._known, self._packed = weights, {*weights}, {*weights}
        #: The plans before and after, with the outcomes of their steps.
        self._done: list[Done] = []
        #: What ONNX Runtime computed, and the arrays that share its memory.
        self._made: list[tuple[Any, Any]] = []

    def execute_node(self) -> None:
        """Run the operator, and set its outputs."""
        epoch, program = self.session.epoch, self._run.program
        program.plans.pop(self._node, None)  # Its outcomes may hold large weights.
        outputs = self.run(self._given)
        program.note_plans(self._node, epoch, self._done)
        for name, value in zip(self._node.outputs, outputs, strict=False):
            if name and value is not None:
                # What is not edited stays what ONNX Runtime made, which holds its memory.
                own = next((own for own, array in self._made if array is value), value)
                self._values.put(name, own, value)

    def analysed(self, context: OpContext, point: IPoint) -> Plan:
        """Return the plan of the operator at a point."""
        plan = super().analysed(context, point)
        self._done.append((plan, []))
        return plan

    def _note(self, outcome: Outcome) -> None:
        """Note what became of the next step of the plan that runs now."""
        self._done[-1][1].append(outcome)

    def compute(self, context: OpContext, replacement: Step | None, values: list[Any]) -> list[Any]:
        """Return the outputs of the operator, or of its replacement."""
        if replacement is None:
            results = self._computed(values)
        else:
            found = self._fragment(len(self._done[0][0]), replacement, values)
            if isinstance(found, str):
                self._note(Host(found))
                with standing_for(self._original):
                    results = several(replacement.replace(values))
            else:
                outcome, changes = found
                self._note(outcome)
                results = [changes[place] for place in sorted(changes)]
            results = [None if one is None else _as_array(one) for one in results]
        self._constant, self._known = set(), set()
        return results

    def execute(self, plan: Plan, values: list[Any]) -> list[Any]:
        """Return values as the steps of a plan edit them, which keep their types."""
        new = list(values)
        for number, step in enumerate(plan):
            for position, value in self._changes(number, step, new).items():
                old = new[position]
                new[position] = _as_array(value, getattr(old, "dtype", None))
                _check(step, old, new[position])
        return new

    def _changes(self, number: int, step: Step, values: list[Any]) -> Mapping[int, Any]:
        """Run a step, and return the values that it changes, by position."""
        if step.action.observe:
            self._note(None)
            return dict(step(values))
        found = self._fragment(number, step, values)
        if not isinstance(found, str):
            outcome, changes = found
            self._note(outcome)
            for place, new in outcome.outputs.items():
                if isinstance(new, str):
                    for places in (self._constant, self._known, self._packed):
                        places.discard(place)
            return changes
        changes = {n: _as_array(v, getattr(values[n], "dtype", None)) for n, v in step(values)}
        positions = step.action.positions
        wanted = range(len(values)) if positions is None else positions
        is_known = bool(wanted) and self._known.issuperset(wanted)
        self._note(Host(found, changes if is_known else None))
        self._constant.difference_update(changes)
        if not is_known:
            self._known.difference_update(changes)
        return changes

    def _fragment(
        self, number: int, step: Step, values: list[Any]
    ) -> tuple[Fragment, dict[int, Any]] | str:
        """Run a step as nodes; return these and the new values, or why it runs on the host."""
        point = "before" if len(self._done) == 1 else "after"
        staging, where = self._run.program.staging, (self._node, point, number)
        found = staging.fragment(*where, step, values, self._constant)
        if isinstance(found, str):
            return found
        parts, options = self._run.program.parts, self._values.options
        try:
            return found, parts.run_fragment(found, values, options)
        except NotStagedError as error:
            staging.refuse(*where, str(error))
            return str(error)

    def _original(self, values: Sequence[Any]) -> Any:
        outputs = self._computed([None if one is None else _as_array(one) for one in values])
        return outputs if len(outputs) > 1 else outputs[0]

    def _computed(self, values: list[Any]) -> list[Any]:
        node, run = self._node, self._run
        if self._is_computed and all(map(operator.is_, values, self._given)):
            names, own = node.outputs, self._values
            self._made = [(own.ort(n), own.shown(n)) if n else (None, None) for n in names]
            return [array for _, array in self._made]
        interpret = interpreter_of(node)
        if interpret is not None:
            found = interpret(node, values, partial(run.body, self._values))
            if found is not None:
                return [array_of(one) for one in found]
        pairs = enumerate(zip(values, self._given, strict=True))
        edited = {place: new for place, (new, old) in pairs if new is not old}
        outputs = run.program.parts.run_node(node, self._values, edited, self._packed)
        self._made = [(value, array_of(value)) for value in outputs]
        return [array for _, array in self._made]


def _lengths_of(given: Mapping[str, Any]) -> Any:
    """Return the shapes of inputs."""
    return {
        name: tuple(value.shape() if callable(value.shape) else value.shape)
        for name, value in given.items()
        if hasattr(value, "shape")
    }


def _as_array(value: Any, dtype: Any = None) -> Any:
    """Return what a routine returned as an array; a number has a dtype that is given."""
    if isinstance(value, (OrtValue, list)):
        return array_of(value)
    return numpy.asarray(value, dtype if isinstance(value, (bool, int, float)) else None)


def _check(step: Step, old: Any, new: Any) -> None:
    """Refuse a value of another type: those of the readers are fixed in the model."""
    was, found = getattr(old, "dtype", None), getattr(new, "dtype", None)
    if was is not None and was != found:
        raise RoutineResultError(
            f"A routine returned {found} for a value of {was}",
            where=step.where,
            fix=f"Convert it: value.astype({str(was)!r})",
        )


def _constant(reference: weakref.ref[Model], value: Any) -> Any:
    model = reference()
    return None if model is None else model.constant(value)
