"""`Analysis`: contexts and plans of graph ops.

Owns the facts of a graph op (site, positions, attributes, constant inputs) and which ops tools are
asked about. An op is analysed when its graph is about to run for the first time. `body_rewriting`
turns the plans into changes of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from amanda_core.driver_kit import MODULE_INPUT, MODULE_OUTPUT, OpContext, Plan, Session, WeakGroup
from amanda_core.interface import IPoint, Site
from amanda_driver_tf.graphs.constants import Constants, SessionConstants
from amanda_driver_tf.graphs.records import Record, Records
from amanda_driver_tf.identity.variables import VARIABLE
from amanda_driver_tf.identity.zones import zone_of_node
from amanda_driver_tf.operators.signature import grouped, signature_of
from amanda_driver_tf.tensorflow_internals.modules import dtypes, op_def_registry, ops, tensor_util
from amanda_driver_tf.tensorflow_internals.names import SIGNATURE_OPS
from amanda_driver_tf.tensorflow_internals.objects import host_function

__all__ = [
    "Analysis",
    "Labels",
    "OpPlans",
    "counts_iterations",
    "is_accumulation",
    "is_container",
    "is_operator",
    "runs_functions",
]

# These hold or name values and compute nothing; eager execution has no such ops.
_SILENT = frozenset(
    {"Const", "NoOp", "Placeholder", "PlaceholderV2", "PlaceholderWithDefault"}
    | {"VarHandleOp", "Variable", "VariableV2", "ControlTrigger"}
    | SIGNATURE_OPS
)
# These steer execution. Their functions are analysed; the ops of TensorFlow 1 loops are wiring.
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "RemoteCall", "SymbolicGradient"})
_CONTROL = frozenset(
    {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}
    | {"Enter", "Exit", "Merge", "NextIteration", "Switch", "LoopCond"}
    | {f"Ref{name}" for name in ("Enter", "Exit", "Merge", "NextIteration", "Switch")}
)


def is_container(op_type: str) -> bool:
    """Return True if an op type only calls functions, or steers which ops run."""
    return op_type in _CALLS or op_type in _CONTROL


def is_operator(op_type: str) -> bool:
    """Return True if tools are asked about ops of a type."""
    return op_type not in _SILENT and not is_container(op_type)


# Names that tf.gradients gives to the iteration counters of TensorFlow 1 loops.
_COUNTERS = re.compile(r"(^|/)[fb]_count(_\d+)?$")


def counts_iterations(op: Any) -> bool:
    """Return True if an op counts the iterations of a TensorFlow 1 loop for its gradient."""
    if op.type not in ("Add", "AddV2", "Sub", "GreaterEqual") or op.inputs[0].dtype != dtypes.int32:
        return False
    source = op.inputs[0].op
    for op_type in ("Switch", "Merge"):
        if source.type == op_type:
            source = source.inputs[0].op
    return source.type == "Enter" and _COUNTERS.search(source.name) is not None


@functools.cache
def runs_functions(op_type: str) -> bool:
    """Return True if ops of a type have functions among their attributes."""
    definition = op_def_registry.get(op_type)
    return definition is not None and any(
        attribute.type in ("func", "list(func)") for attribute in definition.attr
    )


def _is_ours(op: Any) -> bool:
    """Return True if an op calls a routine of a tool, in a graph of a gradient of eager ops."""
    return op.type == "EagerPyFunc" and hasattr(
        host_function(op.get_attr("token").decode()), "has_edited"
    )


class OpPlans(NamedTuple):
    """The plans of one op.

    Attributes:
        context: Its context.
        before: Plan at the op's inputs (for a backward op, of the raw view).
        after: Plan at its outputs.
        aligned_before: For a forward op, plan at the gradients of its outputs.
        aligned_after: For a forward op, plan at its contributions to the gradients of its inputs.
    """

    context: OpContext
    before: Plan
    after: Plan
    aligned_before: Plan
    aligned_after: Plan

    def unaligned(self) -> OpPlans:
        """Return these plans without those at gradients."""
        return self._replace(aligned_before=_NO_PLAN, aligned_after=_NO_PLAN)


_NO_PLAN = Plan()


class Labels:
    """Names of graphs that are the same in every process; resumes with the contexts.

    Two graphs share a label, and so the ids of their ops, if they have the same name, ops and
    variables. This is the case for a function that is retraced for another shape.
    """

    def __init__(self) -> None:
        self._labels: dict[Any, str] = {}
        self._graphs: dict[int, tuple[weakref.ref[Any], str]] = {}
        #: Label -> its graphs that are still alive.
        self._alive: dict[str, WeakGroup[Any]] = {}

    def of(self, graph: Any) -> str:
        """Return the label of a graph."""
        known = self._graphs.get(id(graph))
        if known is not None and known[0]() is graph:
            return known[1]
        name = _UID.sub("", getattr(graph, "name", "") or "")
        digest = hashlib.blake2b(digest_size=8)
        for op in graph.get_operations():
            if op.type not in _SILENT:  # Names of arguments contain numbers of the process.
                digest.update(f"{op.type} {op.name}\n".encode())
        # Ids of tensors, unlike addresses, are never reused.
        variables = tuple(
            ops.tensor_id(outer)
            for outer in getattr(graph, "external_captures", ())
            if isinstance(outer, ops.EagerTensor) and outer.dtype == dtypes.resource
        )
        key = (name, digest.digest(), variables)
        label = self._labels.get(key)
        if label is None:
            number = 1
            label = name
            while label in self._alive:
                number += 1
                label = f"{name}#{number}"
            self._labels[key] = label
            self._alive[label] = WeakGroup()
        self._alive[label].add(graph)
        self._graphs[id(graph)] = (weakref.ref(graph), label)
        return label

    def take_dead(self) -> set[str]:
        """Remove and return the labels whose graphs are all gone; they may be given again."""
        dead = {label for label, graphs in self._alive.items() if not graphs}
        if dead:
            for label in dead:
                del self._alive[label]
            self._labels = {k: label for k, label in self._labels.items() if label not in dead}
            self._graphs = {k: known for k, known in self._graphs.items() if known[0]() is not None}
        return dead


# Suffixes that count earlier traces.
_UID = re.compile(r"_\d+(?=$|_)")


class Analysis:
    """Contexts and plans of the ops of all graphs of one mode and session.

    Args:
        session: The session.
        namespace: Namespace of the contexts.
        constants: Reads the variables of the graphs.
    """

    def __init__(
        self, session: Session, namespace: str, constants: Constants | SessionConstants
    ) -> None:
        self.session = session
        self._namespace = namespace
        self._read, self._variable = constants.read, constants.variable
        #: The ops that call the function whose ops are analysed, from the outermost one.
        self.calls = constants.calls
        self._labels = session.persistent(f"{namespace}.labels", Labels)
        self._plans: dict[int, tuple[Any, OpPlans | None]] = {}

    def forget(self) -> None:
        """Drop the plans found for one rewriting; contexts are kept."""
        self._plans.clear()

    def plans_kept(self, at_gradients: bool) -> dict[tuple[str, str], OpPlans]:
        """Return the plans of the ops analysed so far, by label and name.

        Args:
            at_gradients: Whether to include plans at gradients, and plans of backward ops.
        """
        found = {}
        for op, plans in self._plans.values():
            if plans is not None and (at_gradients or plans.context.is_forward()):
                kept = plans if at_gradients else plans.unaligned()
                if any(kept[1:]):
                    found[self._labels.of(op.graph), op.name] = kept
        return found

    def is_aligned(self) -> bool:
        """Return True if gradients of the ops analysed so far are edited."""
        found = (plans for _, plans in self._plans.values() if plans is not None)
        return any(plans.aligned_before.edits or plans.aligned_after.edits for plans in found)

    def is_edited(self) -> bool:
        """Return True if anything is edited at the ops analysed so far."""
        found = (plans for _, plans in self._plans.values() if plans is not None)
        return any(plan.edits for plans in found for plan in plans[1:])

    def label(self, graph: Any) -> str:
        """Return the label of a graph."""
        return self._labels.of(graph)

    def sweep(self) -> None:
        """Forget the contexts of graphs that are gone."""
        dead = self._labels.take_dead()
        if not dead:
            return
        for context in self.session.contexts():
            key: Any = context.site.key
            owner: Any = context.forward.site.key if context.forward is not None else key
            if context.namespace == self._namespace and (key[1] in dead or owner[1] in dead):
                self.session.forget(context)

    def plans_of(self, op: Any, analyse: bool = True) -> OpPlans | None:
        """Return the plans of an op; None if it is not an operator.

        Args:
            op: The op.
            analyse: Whether to run due analysis routines, or to take the plans as they are.
        """
        known = self._plans.get(id(op))
        if known is not None:
            return known[1]
        plans = None
        if (op.type in (MODULE_INPUT, MODULE_OUTPUT) and not self._is_shown(op)) or _is_ours(op):
            pass
        elif is_operator(op.type) and not counts_iterations(op):
            if self.is_backward(op):
                plans = self._backward(op, self.owner(op), analyse)
            else:
                plans = self._forward(op, analyse)
        self._plans[id(op)] = (op, plans)
        return plans

    def _is_shown(self, op: Any) -> bool:
        """Return True if a tool is shown what a layer takes or returns."""
        path = op.name.rpartition("/")[0]
        return self.session.watches_values and self.session.calls.shows(op.type, path)

    def known(self, op: Any) -> OpPlans | None:
        """Return the plans of an op if it was analysed in this rewriting."""
        found = self._plans.get(id(op))
        return found[1] if found is not None else None

    def owner(self, op: Any) -> Record | None:
        """Return the gradient whose gradient function made an op, or None."""
        found = Records.of(op.graph)
        return found.owner(op) if found is not None else None

    def is_backward(self, op: Any) -> bool:
        """Return True if an op belongs to the backward program."""
        found = Records.of(op.graph)
        if found is None:
            return False
        owner = found.owner(op)
        if owner is None:
            return is_accumulation(op, found)
        return not found.is_recomputed(op, owner)

    def _forward(self, op: Any, analyse: bool) -> OpPlans:
        signature = signature_of(op.type)
        inputs = list(op.inputs)
        if signature is not None:
            inputs = grouped(inputs, signature.lengths(op.get_attr))
        context = self.session.open(
            self._site(op),
            weakref.ref(op),
            inputs,
            _attributes(op),
            input_names=signature.names if signature is not None else (),
            constant=self._constant,
            recomputed=self.owner(op) is not None,
        )
        context.execution[VARIABLE] = self._variable
        at = context.trigger_callback if analyse else context.plan
        try:
            before = at(IPoint.BEFORE_FORWARD)
            context.fill(outputs=list(op.outputs))
            after = at(IPoint.AFTER_FORWARD)
            return OpPlans(
                context,
                before,
                after,
                context.plan(IPoint.BEFORE_BACKWARD),
                context.plan(IPoint.AFTER_BACKWARD),
            )
        finally:
            context.release()

    def _backward(self, op: Any, owner: Record | None, analyse: bool) -> OpPlans:
        forward = None
        if owner is not None and is_operator(owner.forward.type):
            plans = self.plans_of(owner.forward, analyse)
            # A second derivative belongs to the original forward op.
            forward = None if plans is None else (plans.context.forward or plans.context)
        context = self.session.open(self._site(op), weakref.ref(op), forward=forward, backward=True)
        at = context.trigger_callback if analyse else context.plan
        try:
            context.fill(grad_outputs=list(op.inputs))
            before = at(IPoint.BEFORE_BACKWARD)
            context.fill(grad_inputs=list(op.outputs))
            after = at(IPoint.AFTER_BACKWARD)
            return OpPlans(context, before, after, Plan(), Plan())
        finally:
            context.release()

    def _site(self, op: Any) -> Site:
        source, zone = _origin(op)
        return Site(
            key=("node", self._labels.of(op.graph), op.name),
            op_type=op.type,
            namespace=self._namespace,
            name=op.name,
            module_path=op.name.rpartition("/")[0],
            source=source,
            zone=zone,
        )

    def _constant(self, tensor: Any) -> Any:
        if isinstance(tensor, list):
            values = [self._constant(item) for item in tensor]
            return None if any(value is None for value in values) else values
        value = self._read(tensor)
        return value if value is not None else _constant_value(tensor)


def _constant_value(tensor: Any) -> Any:
    """Return the value of a constant; the program may feed it even so.

    TensorFlow's function marks what it reads, also in the graphs around that of the tensor, and a
    session refuses to feed it.
    """
    graphs, graph = [], getattr(tensor, "graph", None)
    while graph is not None:
        graphs.append(graph)
        graph.prevent_feeding = lambda tensor: None
        graph = getattr(graph, "outer_graph", None)
    try:
        return tensor_util.constant_value(tensor)
    finally:
        for graph in graphs:
            with suppress(AttributeError):  # Another thread has read one, too.
                del graph.prevent_feeding


def is_accumulation(op: Any, records: Records | None) -> bool:
    """Return True if an op sums gradients and was made by no gradient function."""
    if records is None or op.type not in ("AddN", "AccumulateNV2"):
        return False
    return any(records.is_gradient(tensor) for tensor in op.inputs)


def _attributes(op: Any) -> Mapping[str, Any]:
    definition = op_def_registry.get(op.type)
    if definition is None:
        return {}
    found: dict[str, Any] = {}
    for attribute in definition.attr:
        if attribute.type not in ("func", "list(func)", "tensor", "list(tensor)"):
            # TensorFlow may have removed attributes that have their default value.
            with contextlib.suppress(ValueError):
                found[attribute.name] = op.get_attr(attribute.name)
    return found


# Packages whose frames are not the user's program.
_PACKAGES = ("tensorflow", "keras", "tf_keras", "amanda", "amanda_core", "amanda_driver_tf")


@functools.cache
def _folders() -> dict[str, str]:
    """Map the folders of those packages that are loaded to their names."""
    found = {}
    for name in _PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            found[os.path.dirname(file) + os.sep] = name
    return found


@functools.cache
def _module(file: str) -> str | None:
    """Return the name of the module in one of these packages; "" for generated code, None
    otherwise.
    """
    for folder, package in _folders().items():
        if file.startswith(folder):
            return f"{package}." + file[len(folder) :].removesuffix(".py").replace(os.sep, ".")
    return "" if file.startswith("<") else None


def _origin(op: Any) -> tuple[str | None, str]:
    """Return ``file:line`` of the user's call that made an op, and the op's zone."""
    frames = [(_module(one.filename), one) for one in reversed(op.traceback or ())]
    users = next((one for module, one in frames if module is None), None)
    source = f"{os.path.basename(users.filename)}:{users.lineno}" if users is not None else None
    return source, zone_of_node(op, ((module or "", one.name) for module, one in frames))
