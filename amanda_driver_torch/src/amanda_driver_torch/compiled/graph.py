"""Analysis of a graph that Dynamo has traced, and weaving of the plans into it.

Owns which operators a graph has and what tools are shown of them. It runs when the graph is
compiled; `operators` is what runs afterwards.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from amanda_core.driver_kit import OCCURRENCES, Activation, OpContext, Origin, Plan
from amanda_core.interface import IPoint, Site
from amanda_driver_torch.compiled.aliases import Aliases
from amanda_driver_torch.compiled.backward_operators import BackwardOperators
from amanda_driver_torch.compiled.call_sites import Called, Places, called_of, wrapper_around
from amanda_driver_torch.compiled.choice import (
    FORWARD_ONLY,
    AnalysisFailed,
    CannotWeave,
    misses_backward,
)
from amanda_driver_torch.compiled.custom_functions import CustomCall
from amanda_driver_torch.compiled.execution import OpPlan, edits_only
from amanda_driver_torch.compiled.graph_tools import GraphTools
from amanda_driver_torch.compiled.graph_weights import GraphWeights, Leaves
from amanda_driver_torch.compiled.host import Row
from amanda_driver_torch.compiled.operators import OperatorMode, Woven
from amanda_driver_torch.compiled.refusals import check, does_nothing, likes
from amanda_driver_torch.compiled.traced_graph import (
    TracedGraph,
    example,
    is_real,
    is_static,
    touches_tensors,
)
from amanda_driver_torch.execution.viewing import passes_weights_on
from amanda_driver_torch.gradients.function_apply import frame_of_apply
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.interception.tracing import IN_TRANSFORMS
from amanda_driver_torch.operators.module_values import INPUT, OUTPUT
from amanda_driver_torch.operators.operator import Args, Kwargs, Operator
from amanda_driver_torch.operators.signature import BoundCall, bind, outputs_of
from amanda_driver_torch.threads.modes import call_routine
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.dynamo import (
    CHECKPOINT,
    CUSTOM_FUNCTION,
    HIGHER_ORDER,
    INFERENCE,
    STATE_CHANGES,
    TENSOR_HOOK,
    HigherOrderOperator,
    ends_at_break,
    is_of_transforms,
    on_fake_tensors,
    quiet_code,
    transform_levels,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)

__all__ = ["Weaving"]


#: What stands for the inputs and outputs of modules, in a graph that is exported.
_MARKERS = {one.func: one for one in (INPUT, OUTPUT)}
#: Why a routine on the host finds no values in its context.
_CLOSED = (
    "Compiled code passes a routine only the values that it selects; with "
    "AMANDA_TORCH_COMPILED=eager a callable runs eagerly, and its context has all"
)
#: What a graph before or after a graph break gives to the rest of the program.
_VIEWS_PASSED_ON = "views that compiled callables pass on at graph breaks"


class Weaving:
    """The analysis of the operators of a graph, and the steps of their plans, written into it.

    Args:
        gm: The graph.
        tools: The tools.
        places: Where its operators are.
        leaves: The leaves that graphs of the same code were traced with.
        is_broken: Whether it is one of several graphs of a callable.
        take_row: Returns a row, for a graph that takes it, given what is written.
            None if nothing is written.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        tools: GraphTools,
        places: Places,
        leaves: Leaves,
        is_broken: bool,
        take_row: Callable[[Sequence[Woven]], Row | None] | None,
    ) -> None:
        self.tools, self.places, self.take_row = tools, places, take_row
        guards = take_row is not None
        self.weights = GraphWeights(leaves, tools.constant, tools.gaps, guards)
        self.graph = TracedGraph(gm, tools.host)
        self.is_broken = is_broken or ends_at_break(gm)
        #: id of a value that Dynamo noted -> the value, and the one that analysis was shown.
        self.again: dict[int, tuple[Any, Any]] = {}
        #: Contexts of the operators that were analysed.
        self.opened: list[OpContext] = []
        #: The number of transforms of `torch.func` in which a node runs.
        self.transforms = 0
        self.woven: list[tuple[fx.Node, Woven]] = []
        self.aliases = Aliases()

    def weave(self) -> tuple[fx.GraphModule, list[Woven]]:
        """Analyse the operators, and write the steps.

        Returns:
            The graph, which is a copy if it takes a row, and what was written, or would be.

        Raises:
            CannotWeave: A tool asks for something that a compiled graph cannot have.
            AnalysisFailed: The analysis of a tool failed.
        """
        tools = self.tools
        tools.nodes.clear()
        try:
            found = self._weave()
        except Exception:
            # Its operators run eagerly, as the same ones.
            for context in self.opened:
                if not tools.woven.get(context):
                    tools.session.forget(context)
            raise
        for context in self.opened:
            tools.woven.set(context, True)
        return self.graph.module, found

    def _weave(self) -> list[Woven]:
        grad = torch.is_grad_enabled()
        try:
            with on_fake_tensors(self.graph.fake_mode):
                self._analyse_graph(self.graph.module)
                if self.aliases.check(self.graph.module.graph, self.is_broken):
                    self.tools.gaps[_VIEWS_PASSED_ON] = (
                        "if the program writes one in place, gradients through its base are lost"
                    )
                self.weights.check()
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
                self.weights.note(node)
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

    def _is_in_transform(self, node: fx.Node) -> bool:
        """Return True for nodes that run in a transform of `torch.func`, or are a part of it."""
        levels = transform_levels(node.target)
        if levels is None:
            frames = called_of(node).frames
            return bool(self.transforms) or (bool(frames) and is_of_transforms(frames[0].names))
        self.transforms += levels
        if self.tools.session.sees_transforms:
            raise CannotWeave("a tool is shown operators inside transforms of torch.func")
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
        custom: CustomCall | None = None
        if target is CUSTOM_FUNCTION:
            watches = self.tools.session.wants_backward and not misses_backward()
            custom = CustomCall.of(node, watches)
            operator, target = custom.operator, custom.run
        elif isinstance(target, HigherOrderOperator):
            if target.__name__ == TENSOR_HOOK:
                self._check_hook(node)
                return None
            if target.__name__ not in HIGHER_ORDER:
                raise CannotWeave(f"the graph has the higher-order operator {target}")
            operator = Operator(target, target, target.__name__)
        if target is INFERENCE:
            raise CannotWeave("it enters the inference mode")
        args, kwargs = self.graph.given(node)
        if custom is not None:
            args, kwargs = self.graph.values((custom.args, {}))
        called = called_of(node)
        if target in _MARKERS:  # They are told apart by their modules alone.
            called = called._replace(frames=(), whole=True)
        before = len(self.opened)
        if operator is not None:
            self._show(node, tree_map(self._again, example(node)))
            wrapper = frame_of_apply() if custom is not None else None
            given = operator, target, args, kwargs, called, wrapper, example(node)
            plans = [self._operator(*given)]
            names = []
        elif touches_tensors(args, kwargs):
            with (mode := _Analysing(self, called)):
                returned = target(*args, **kwargs)
            self._show(node, returned)
            plans, names = mode.plans, mode.names
        else:
            return None
        self.tools.nodes[node.name] = self.opened[before:]
        if not any(plans):
            return None
        before_weaving = node.args, node.kwargs
        if custom is not None:
            node.args, node.kwargs = custom.args, {}
        woven = Woven(target, plans, names, operator is not None, node.name)
        if any(plan is not None and plan.backward is not None for plan in plans):
            self._analyse_backward(node, woven)
            if not any(plans):
                node.args, node.kwargs = before_weaving
                return None
        if node.graph in self.graph.runs and any(plan.on_host for plan in plans if plan):
            raise CannotWeave("a routine on the host is inside activation checkpointing")
        self.aliases.note_host(woven.on_host)
        return woven

    def _check_hook(self, node: fx.Node) -> None:
        """Refuse a hook that the program registers on a tensor whose gradient a tool gets.

        In eager mode a tool gets the gradient before such a hook has changed it.
        """
        body: Any = getattr(node.graph.owning_module, str(cast("Any", node.args[1]).target))
        body.forward = quiet_code(body.forward)  # Hooks are not a part of the model.
        hooked: Any = node.args[0]
        while hooked.target in (node.target, getitem):
            hooked = hooked.args[0]
        plans = [plan for one, found in self.woven if one is hooked for plan in found.plans]
        if any(plan is not None and plan.arriving for plan in plans):
            raise CannotWeave(
                f"a tool gets the gradient of a tensor on which the program registers a hook "
                f"({hooked.name})"
            )

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
        if is_static(value):
            for old, new in zip(tree_leaves(example(node)), tree_leaves(value), strict=False):
                self.again[id(old)] = old, new
            self.aliases.show(node, value)
            node.meta["example_value"] = value

    def _again(self, value: Any) -> Any:
        return self.again.get(id(value), (value, value))[1]

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
        shown = [tree_map(self.weights.shown, value) for value in bound.values]
        real = tree_map(self.weights.shown, (args, kwargs))
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
                return passes_weights_on(operator, *(real if is_real(real) else (args, kwargs)))

        context.execution["passes_weights_on"] = passes_on
        context.execution["writes"] = bound.signature.mutated
        context.execution["destinations"] = tensors_in([bound.out])
        try:
            before = self._trigger(context, IPoint.BEFORE_FORWARD)
            if is_real(real) and passes_on():
                self.weights.note_views(operator, real, outputs)
            context.fill(outputs=outputs)
            after = self._trigger(context, IPoint.AFTER_FORWARD)
            arriving, leaving = map(context.plan, (IPoint.BEFORE_BACKWARD, IPoint.AFTER_BACKWARD))
            nothing = does_nothing(operator, func, bound, outputs)
            if not self._gradients(bound) or (not arriving.replacement and nothing):
                arriving = leaving = Plan()  # In eager mode it has no node, and so no gradients.
            if self.tools.exports:
                before, after = edits_only(before), edits_only(after)
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
                self.weights.note_edits(plan.before.steps, shown)
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

    def _site(self, origin: Origin, activation: Activation, given: Sequence[Any]) -> Site:
        occurrence = 0
        if origin.scope.root:
            weights = tuple((i, id(v)) for i, v in enumerate(given) if id(v) in self.weights.ids)
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
            if id(value) in self.weights.ids and value.requires_grad and value.is_leaf:
                attachment.backward.name_leaf(value, activation.scope)
        return BackwardOperators(self.tools.host, context, self._trigger, _CLOSED)

    def _gradients(self, bound: BoundCall) -> bool:
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in tensors_in(bound.values)
        )


class _Analysing(OperatorMode):
    """Analyses the operators that a node runs."""

    def __init__(self, weaving: Weaving, called: Called) -> None:
        super().__init__()
        self._weaving, self._called = weaving, called
        self.plans: list[OpPlan | None] = []
        self.names: list[str] = []

    def operate(self, operator: Operator, func: Any, args: Args, kwargs: Kwargs) -> Any:
        returned = func(*args, **kwargs)
        wrapper = wrapper_around(sys._getframe(1), Weaving._analyse_node.__code__)
        found = self._weaving._operator(
            operator, func, args, kwargs, self._called, wrapper, returned
        )
        self.plans.append(found)
        self.names.append(operator.op_type)
        return returned
