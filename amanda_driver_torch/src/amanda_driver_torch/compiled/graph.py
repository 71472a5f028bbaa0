"""Analysis of a graph that Dynamo has traced, and weaving of the plans into it.

Owns which operators a graph has and what tools are shown of them. It runs when the graph is
compiled; `operators` is what runs afterwards. The module is a little over 500 lines because it is
one pass over a graph.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import fx, nn

from amanda_core.driver_kit import (
    OCCURRENCES,
    Activation,
    Known,
    OpContext,
    Origin,
    Plan,
    Session,
    Sites,
)
from amanda_core.interface import IPoint, Site
from amanda_driver_torch.compiled.aliases import Aliases
from amanda_driver_torch.compiled.backward_operators import BackwardOperators
from amanda_driver_torch.compiled.call_sites import Called, Places, called_of
from amanda_driver_torch.compiled.choice import FORWARD_ONLY, CannotWeave, misses_backward
from amanda_driver_torch.compiled.execution import OpPlan
from amanda_driver_torch.compiled.host import Host
from amanda_driver_torch.compiled.operators import OperatorMode, Woven
from amanda_driver_torch.compiled.refusals import check, does_nothing, likes
from amanda_driver_torch.compiled.traced_graph import TracedGraph, example
from amanda_driver_torch.execution.viewing import passes_weights_on
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.identity.frames import is_own, is_torchs
from amanda_driver_torch.interception.tracing import IN_TRANSFORMS
from amanda_driver_torch.operators.module_values import INPUT, OUTPUT
from amanda_driver_torch.operators.operator import Operator
from amanda_driver_torch.operators.signature import BoundCall, bind, outputs_of
from amanda_driver_torch.threads.modes import call_routine
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.dynamo import (
    CHECKPOINT,
    HIGHER_ORDER,
    INFERENCE,
    STATE_CHANGES,
    FakeTensor,
    HigherOrderOperator,
    ends_at_break,
    is_made_inside,
    is_of_transforms,
    on_fake_tensors,
    transform_levels,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)
from amanda_driver_torch.torch_internals.dynamo_guards import guard_identity
from amanda_driver_torch.torch_internals.tensor_attributes import is_weight

__all__ = ["AnalysisFailed", "GraphTools", "Leaves", "weave"]


class AnalysisFailed(Exception):
    """An exception of a tool's analysis."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


#: What stands for the inputs and outputs of modules, in a graph that is exported.
_MARKERS = {one.func: one for one in (INPUT, OUTPUT)}
LEAVES = "leaves that are made in each step, such as inputs that require gradients"
#: Why a routine on the host finds no values in its context.
_CLOSED = (
    "Compiled code passes a routine only the values that it selects; with "
    "AMANDA_TORCH_COMPILED=eager a callable runs eagerly, and its context has all"
)
#: What a graph before or after a graph break gives to the rest of the program.
VIEWS_PASSED_ON = "views that compiled callables pass on at graph breaks"


@dataclasses.dataclass
class Leaves:
    """The leaves that are not parameters, of graphs of the same code.

    They are weights, unless the program makes new ones.

    Attributes:
        found: Place in the program -> those that were there.
        edited: Places of those that a tool edits where an operator reads them.
    """

    found: dict[Any, list[Known[bool]]] = dataclasses.field(default_factory=dict)
    edited: set[Any] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class GraphTools:
    """The parts of a session that the analysis of graphs needs.

    Attributes:
        session: The session.
        host: Calls routines on the host.
        sites: Names operators.
        constant: Returns a value that is the same in every execution of its op, else None.
        gaps: For the coverage: what is not as without tools, and why.
        woven: Contexts of operators of graphs that run -> True.
        exports: Whether the graph becomes a program that runs without Amanda.
        kernels: Whether the compiler's kernels are shown as operators.
        nodes: Name of a node of the last graph -> contexts of its operators.
    """

    session: Session
    host: Host
    sites: Sites[Site]
    constant: Callable[[Any], Any]
    gaps: dict[str, str]
    woven: Known[bool]
    exports: bool = False
    kernels: bool = False
    nodes: dict[str, list[OpContext]] = dataclasses.field(default_factory=dict)


def _no_row(woven: Sequence[Woven]) -> None:
    """Return that a graph takes no row."""


def weave(
    gm: fx.GraphModule,
    tools: GraphTools,
    places: Places,
    leaves: Leaves,
    is_broken: bool = False,
    take_row: Callable[[Sequence[Woven]], torch.Tensor | None] | None = _no_row,
) -> tuple[fx.GraphModule, list[Woven]]:
    """Analyse the operators of a graph, and write the steps of their plans into it.

    Args:
        gm: The graph.
        tools: The tools.
        places: Where its operators are.
        leaves: The leaves that graphs of the same code were traced with.
        is_broken: Whether it is one of several graphs of a callable.
        take_row: Returns the number of a row, for a graph that takes it, given what is written.
            None if nothing is written.

    Returns:
        The graph, which is a copy if it takes a row, and what was written, or would be.

    Raises:
        CannotWeave: A tool asks for something that a compiled graph cannot have.
        AnalysisFailed: The analysis of a tool failed.
    """
    weaving = _Weaving(gm, tools, places, leaves, is_broken, take_row)
    tools.nodes.clear()
    try:
        found = weaving.weave()
    except Exception:
        # Its operators run eagerly, as the same ones.
        for context in weaving.opened:
            if not tools.woven.get(context):
                tools.session.forget(context)
        raise
    for context in weaving.opened:
        tools.woven.set(context, True)
    return weaving.graph.module, found


class _Weaving:
    def __init__(
        self,
        gm: fx.GraphModule,
        tools: GraphTools,
        places: Places,
        leaves: Leaves,
        is_broken: bool,
        take_row: Callable[[Sequence[Woven]], torch.Tensor | None] | None,
    ) -> None:
        self.tools, self.places, self.leaves = tools, places, leaves
        self.take_row = take_row
        self.graph = TracedGraph(gm, tools.host)
        self.is_broken = is_broken or ends_at_break(gm)
        #: id of a fake tensor -> the tensor, and the parameter, buffer or view of one that it
        #: stands for.
        self.real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: ids of these.
        self.weights: set[int] = set()
        #: id of a leaf that is not a parameter -> its place in the program.
        self.sources: dict[int, Any] = {}
        #: The places of those whose values tools are not shown, unless they edit them nevertheless.
        self.hidden: set[Any] = set()
        #: id of a value that Dynamo noted -> the value, and the one that analysis was shown.
        self.again: dict[int, tuple[Any, Any]] = {}
        #: Contexts of the operators that were analysed.
        self.opened: list[OpContext] = []
        #: The number of transforms of `torch.func` in which a node runs.
        self.transforms = 0
        self.woven: list[tuple[fx.Node, Woven]] = []
        self.aliases = Aliases()

    def weave(self) -> list[Woven]:
        grad = torch.is_grad_enabled()
        try:
            with on_fake_tensors(self.graph.fake_mode):
                self._analyse_graph(self.graph.module)
                if self.aliases.check(self.graph.module.graph, self.is_broken):
                    self.tools.gaps[VIEWS_PASSED_ON] = (
                        "if the program writes one in place, gradients through its base are lost"
                    )
                if self.hidden & self.leaves.edited:
                    raise CannotWeave("a tool edits a weight that the program makes in each step")
                for node, found in self.woven:
                    self.graph.find_lifted(node, found)
        finally:
            torch.set_grad_enabled(grad)
        written = [one for _, one in self.woven]
        if self.take_row is not None:
            if (row := self.take_row(written)) is not None:
                self.graph.take_row(row)
            self.graph.write(self.woven)
        return written

    def _analyse_graph(self, gm: fx.GraphModule) -> None:
        states: dict[fx.Node, Any] = {}
        for node in tuple(gm.graph.nodes):
            self.aliases.begin(node)
            if node.op == "placeholder":
                self._note_parameter(node)
            elif node.target in STATE_CHANGES:
                given = fx.node.map_arg(node.args, states.__getitem__)
                states[node] = cast("Any", node.target)(*given)
            elif node.op == "call_module":
                raise CannotWeave(f"the graph calls the module {node.target}")
            elif node.target is CHECKPOINT:
                body = getattr(gm, node.args[0].target)
                self.graph.runs[body.graph] = node
                self._analyse_graph(body)
            elif node.op in ("call_function", "call_method"):
                found = None if self._is_in_transform(node) else self._analyse_node(node)
                self.aliases.end(node)
                if found is not None:
                    self.woven.append((node, found))

    def _note_parameter(self, node: fx.Node) -> None:
        argument = node.meta.get("grapharg")
        if argument is None or not getattr(argument, "is_tensor", False):
            return
        source, value = argument.source, argument.example
        if is_made_inside(source):
            raise CannotWeave("it makes a parameter, which has no values before it runs")
        if type(value) is FakeTensor or not isinstance(value, torch.Tensor):
            return
        if is_weight(value) and not isinstance(value, nn.Parameter):
            known = self.leaves.found.setdefault(source, [])
            if not all(known):  # One has died.
                self.sources[id(node.meta["example_value"])] = source
                self.hidden.add(source)
                self.tools.gaps[LEAVES] = "tools are not shown their values in compiled callables"
                return
            leaf: Known[bool] = Known()
            leaf.set(value, True)
            known.append(leaf)
            self.sources[id(value)] = source
        if is_weight(value) or self.tools.constant(value) is not None:
            example = node.meta["example_value"]
            self.real[id(example)] = example, value
            self.weights.add(id(value))
            if self.take_row is not None:
                # What is decided for this weight does not hold for another one.
                guard_identity(source)

    def _is_in_transform(self, node: fx.Node) -> bool:
        """Return True for nodes that run in a transform of `torch.func`, or are a part of it."""
        levels = transform_levels(node.target)
        if levels is None:
            frames = called_of(node).frames
            return bool(self.transforms) or (bool(frames) and is_of_transforms(frames[0].names))
        self.transforms += levels
        self.tools.session.warn_once(IN_TRANSFORMS)
        self.tools.session.note_inside("compiled callables", "torch.func transforms")
        return True

    # Analysis.

    def _analyse_node(self, node: fx.Node) -> Woven | None:
        target: Any = node.target
        if node.op == "call_method":
            target = getattr(torch.Tensor, str(target), None)
            if target is None:
                return None
        operator = _MARKERS.get(target) or OperatorMode.operator(target)
        if isinstance(target, HigherOrderOperator):
            if target.__name__ not in HIGHER_ORDER:
                raise CannotWeave(f"the graph has the higher-order operator {target}")
            operator = Operator(target, target, target.__name__)
        if target is INFERENCE:
            raise CannotWeave("it enters the inference mode")
        args, kwargs = self.graph.given(node)
        called = called_of(node)
        if target in _MARKERS:  # They are told apart by their modules alone.
            called = called._replace(frames=(), whole=True)
        before = len(self.opened)
        if operator is not None:
            self._show(node, tree_map(self._again, example(node)))
            plans = [self._operator(operator, target, args, kwargs, called, None, example(node))]
            names = []
        elif _touches_tensors(args, kwargs):
            with (mode := _Analysing(self, called)):
                returned = target(*args, **kwargs)
            self._show(node, returned)
            plans, names = mode.plans, mode.names
        else:
            return None
        self.tools.nodes[node.name] = self.opened[before:]
        if not any(plans):
            return None
        woven = Woven(target, plans, names, operator is not None, node.name)
        if any(plan is not None and plan.backward is not None for plan in plans):
            self._analyse_backward(node, woven)
            if not any(plans):
                return None
        if node.graph in self.graph.runs and any(plan.on_host for plan in plans if plan):
            raise CannotWeave("a routine on the host is inside activation checkpointing")
        self.aliases.note_host(woven.on_host)
        return woven

    def _analyse_backward(self, node: fx.Node, woven: Woven) -> None:
        """Analyse the backward operators of a node by a run on fake tensors."""
        try:
            self.graph.find_lifted(node, woven, analyses=True)
        finally:
            for plan in woven.plans:
                if plan is not None and plan.backward is not None:
                    self.opened += plan.backward.opened
                    plan.backward.settle()
                    plan.backward = plan.backward or None

    def _show(self, node: fx.Node, value: Any) -> None:
        """Let later operators get the value that analysis was shown here."""
        if _is_static(value):
            for old, new in zip(tree_leaves(example(node)), tree_leaves(value), strict=False):
                self.again[id(old)] = old, new
            self.aliases.show(node, value)
            node.meta["example_value"] = value

    def _again(self, value: Any) -> Any:
        return self.again.get(id(value), (value, value))[1]

    def _shown(self, value: Any) -> Any:
        return self.real.get(id(value), (value, value))[1]

    def _operator(
        self,
        operator: Operator,
        func: Any,
        args: Any,
        kwargs: Any,
        called: Called,
        wrapper: Any,
        returned: Any,
    ) -> OpPlan | None:
        session, bound = self.tools.session, bind(func, args, kwargs)
        outputs = outputs_of(returned)
        if returned is None and bound.signature.in_place:
            outputs = [bound.values[0]]
        shown = [tree_map(self._shown, value) for value in bound.values]
        real = tree_map(self._shown, (args, kwargs))
        given = [*real[0], *real[1].values()]
        origin, activation = self.places.origin(operator.op_type, called, wrapper)
        site = self._site(origin, activation, given)
        source = called.source or self.places.source
        site = dataclasses.replace(site, source=source, same_as="eager")
        with unset_fake_temporarily():
            context = session.open(
                site,
                operator.raw,
                inputs=shown,
                attrs=bound.attrs,
                input_names=bound.signature.names,
                constant=self.tools.constant,
            )
        self.opened.append(context)
        if context.get("in_kernels", False) != self.tools.kernels:
            session.analyse_again(context, *IPoint)
            context["in_kernels"] = self.tools.kernels
        left: dict[str, Any] = {}

        def passes_on() -> bool:
            with unset_fake_temporarily():
                return passes_weights_on(operator, *(real if _is_real(real) else (args, kwargs)))

        context.execution["passes_weights_on"] = passes_on
        context.execution["writes"] = bound.signature.mutated
        context.execution["destinations"] = tensors_in([bound.out])
        try:
            before = self._trigger(context, IPoint.BEFORE_FORWARD)
            if _is_real(real) and passes_on():
                self._note_views(operator, real, outputs)
            context.fill(outputs=outputs)
            after = self._trigger(context, IPoint.AFTER_FORWARD)
            arriving, leaving = map(context.plan, (IPoint.BEFORE_BACKWARD, IPoint.AFTER_BACKWARD))
            nothing = does_nothing(operator, func, bound, outputs)
            if not self._gradients(bound) or (not arriving.replacement and nothing):
                arriving = leaving = Plan()  # In eager mode it has no node, and so no gradients.
            if self.tools.exports:
                before, after = _edits_only(before), _edits_only(after)
                arriving = leaving = Plan()  # The program computes no gradients.
            backward = None
            if self._gradients(bound) and not nothing:
                backward = self._backward(context, given, activation)
            replacement = before.replacement
            if backward is not None and replacement and not replacement.action.staged:
                raise CannotWeave(
                    "a tool analyses the backward operators of an operator that is replaced on the "
                    f"host ({context.name})"
                )
            plan = OpPlan(
                self.tools.host, before, after, arriving, leaving, likes(outputs), backward
            )
            self.aliases.operator(plan, bound, outputs)
            if plan:
                self._note_edits(plan, shown)
                if self.tools.exports and (steps := plan.steps_on_host):
                    raise CannotWeave(f"{steps[0].where}, is not marked with amanda.staged")
                check(context, plan, bound, outputs)
                varies = any(weight.varies for weight in context.weights.values())
                left = {"closed": _CLOSED, "weights": None if varies else context.weights}
                return plan
            return None
        finally:
            context.release()
            context.execution |= left  # For routines that have the context.

    def _note_edits(self, plan: OpPlan, values: Sequence[Any]) -> None:
        for step in plan.before.steps if self.sources else ():
            chosen = range(len(values)) if step.action.positions is None else step.action.positions
            for value in () if step.action.observe else tensors_in(values[i] for i in chosen):
                if id(value) in self.sources:
                    self.leaves.edited.add(self.sources[id(value)])
                    self.hidden.discard(self.sources[id(value)])

    def _note_views(self, operator: Operator, real: Any, outputs: Sequence[Any]) -> None:
        """Let later operators get views of weights, which show where in these they lie."""
        with unset_fake_temporarily(), torch.inference_mode(False):
            views = outputs_of(operator.func(*real[0], **real[1]))
        for output, view in zip(tensors_in(outputs), tensors_in(views), strict=True):
            self.real[id(output)] = output, view

    def _site(self, origin: Origin, activation: Activation, given: Sequence[Any]) -> Site:
        occurrence = 0
        if origin.scope.root:
            weights = tuple((i, id(v)) for i, v in enumerate(given) if id(v) in self.weights)
            key = (origin.numbers, weights)
            occurrence = activation.counts.get(key, 0)
            activation.counts[key] = occurrence + 1
        found: Site | int = 0
        while isinstance(found, int):  # Until the site is known to read parts of parameters.
            found = self.tools.sites.resolve(origin, given, min(occurrence, OCCURRENCES))
        return found

    def _trigger(self, context: OpContext, i_point: IPoint) -> Plan:
        if not self.tools.session.due(context, i_point):
            return context.trigger_callback(i_point)
        try:
            # What analysis computes with parameters is real.
            with unset_fake_temporarily(), torch.inference_mode(False):
                return call_routine(context.trigger_callback, i_point)
        except Exception as error:
            raise AnalysisFailed(error) from error

    def _backward(
        self, context: OpContext, given: Sequence[Any], activation: Activation
    ) -> BackwardOperators | None:
        """Return the backward operators of an operator, to be analysed; None if no tool does.

        Args:
            context: Its context.
            given: Its arguments.
            activation: The activation in which it runs.
        """
        session = self.tools.session
        if not session.wants_backward or self.tools.exports:
            return None
        if misses_backward():
            self.tools.gaps["backward operators of compiled callables"] = FORWARD_ONLY
            session.note_inside("compiled training", f"backward operators: {FORWARD_ONLY}")
            return None
        attachment = STATE.attachment
        assert attachment is not None
        for value in tensors_in(given):
            if id(value) in self.weights and value.requires_grad and value.is_leaf:
                attachment.backward.name_leaf(value, activation.scope)
        return BackwardOperators(self.tools.host, context, self._trigger, _CLOSED)

    def _gradients(self, bound: BoundCall) -> bool:
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in tensors_in(bound.values)
        )


def _edits_only(plan: Plan) -> Plan:
    """Return a plan without the steps that only look."""
    return Plan([one for one in plan.steps if not one.action.observe], plan.replacement)


class _Analysing(OperatorMode):
    """Analyses the operators that a node runs."""

    def __init__(self, weaving: _Weaving, called: Called) -> None:
        super().__init__()
        self._weaving, self._called = weaving, called
        self.plans: list[OpPlan | None] = []
        self.names: list[str] = []

    def operate(
        self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        returned = func(*args, **kwargs)
        wrapper = _wrapper(sys._getframe(1))
        found = self._weaving._operator(
            operator, func, args, kwargs, self._called, wrapper, returned
        )
        self.plans.append(found)
        self.names.append(operator.op_type)
        return returned


def _wrapper(frame: FrameType | None) -> Any:
    """Return the innermost frame of torch below the driver's own: code, globals, position."""
    while frame is not None and frame.f_code is not _Weaving._analyse_node.__code__:
        if not is_own(frame.f_code):
            names = frame.f_globals
            return (frame.f_code, names, frame.f_lasti) if is_torchs(names) else None
        frame = frame.f_back
    return None


def _is_static(value: Any) -> bool:
    return all(
        type(size) is int
        for one in tree_leaves(value)
        if isinstance(one, torch.Tensor)
        for size in one.shape
    )


def _is_real(values: Any) -> bool:
    """Return True if there are tensors, and all values are known before a graph runs."""
    found = tree_leaves(values)
    unknown = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return _touches_tensors(found) and not any(isinstance(value, unknown) for value in found)


def _touches_tensors(*values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in tree_leaves(values))
