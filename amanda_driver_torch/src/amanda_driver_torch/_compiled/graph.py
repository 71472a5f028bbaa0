"""Analysis of a graph that Dynamo has traced, and weaving of the plans into it.

Owns which operators a graph has and what tools are shown of them. It runs when the graph is
compiled; `operators` is what runs afterwards. The module is a little over 400 lines because it is
one pass over a graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import fx, nn

from amanda_core import IPoint, OpContext, Plan, Session, Site
from amanda_core.scopes import Activation
from amanda_core.sites import OCCURRENCES, Origin, Sites
from amanda_core.weak import Known
from amanda_driver_torch._autograd.nodes import tensors_in
from amanda_driver_torch._compiled.aliases import Aliases
from amanda_driver_torch._compiled.call_sites import Called, Places, called_of
from amanda_driver_torch._compiled.choice import BACKWARD, misses_backward
from amanda_driver_torch._compiled.execution import Lifted, OpPlan
from amanda_driver_torch._compiled.host import Host
from amanda_driver_torch._compiled.operators import OperatorMode, Woven
from amanda_driver_torch._compiled.refusals import CannotWeave, check, does_nothing, likes
from amanda_driver_torch._entry.tracing import IN_TRANSFORMS
from amanda_driver_torch._execution.viewing import passes_weights_on
from amanda_driver_torch._identity.frames import is_own, is_torchs
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._operators.signature import BoundCall, bind, outputs_of
from amanda_driver_torch._thread.modes import call_routine
from amanda_driver_torch._torch.dynamo import (
    CHECKPOINT,
    HIGHER_ORDER,
    INFERENCE,
    STATE_CHANGES,
    FakeTensor,
    HigherOrderOperator,
    add_buffer,
    ends_at_break,
    fresh_symbols,
    guard_identity,
    is_made_inside,
    is_of_transforms,
    transform_levels,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)
from amanda_driver_torch._torch.tensor_attributes import is_weight

__all__ = ["AnalysisFailed", "GraphTools", "Leaves", "weave"]


class AnalysisFailed(Exception):
    """An exception of a tool's analysis."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


#: By their places in the program: leaves that are no parameters. They are weights, unless the
#: program makes new ones.
Leaves = dict[Any, list[Known[bool]]]
LEAVES = "leaves that are made in each step, such as inputs that require gradients"
#: Why a routine on the host finds no values in its context.
_CLOSED = (
    "Compiled code passes a routine only the values that it selects; with "
    "AMANDA_TORCH_COMPILED=eager a callable runs eagerly, and its context has all"
)
#: What a graph before or after a graph break gives to the rest of the program.
VIEWS_PASSED_ON = "views that compiled callables pass on at graph breaks"


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
    """

    session: Session
    host: Host
    sites: Sites[Site]
    constant: Callable[[Any], Any]
    gaps: dict[str, str]
    woven: Known[bool]


def weave(
    gm: fx.GraphModule, tools: GraphTools, places: Places, leaves: Leaves, is_broken: bool = False
) -> list[Woven]:
    """Analyse the operators of a graph, and write the steps of their plans into it.

    Args:
        gm: The graph.
        tools: The tools.
        places: Where its operators are.
        leaves: The leaves that graphs of the same code were traced with.
        is_broken: Whether it is one of several graphs of a callable.

    Returns:
        What was written.

    Raises:
        CannotWeave: A tool asks for something that a compiled graph cannot have.
        AnalysisFailed: The analysis of a tool failed.
    """
    weaving = _Weaving(gm, tools, places, leaves, is_broken)
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
    return found


class _Weaving:
    def __init__(
        self,
        gm: fx.GraphModule,
        tools: GraphTools,
        places: Places,
        leaves: Leaves,
        is_broken: bool,
    ) -> None:
        self.gm, self.tools, self.places, self.leaves = gm, tools, places, leaves
        self.is_broken = is_broken or ends_at_break(gm)
        # That of the values: for the backend there is another one.
        self.fake_mode = next(
            (
                value.fake_mode
                for node in gm.graph.nodes
                for value in tree_leaves(_example(node))
                if isinstance(value, FakeTensor)
            ),
            None,
        )
        #: id of a fake tensor -> the tensor, and the parameter, buffer or view of one that it
        #: stands for.
        self.real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: ids of these.
        self.weights: set[int] = set()
        #: id of a tensor that routines refer to -> the tensor, and a fake one.
        self.lifted: dict[int, tuple[torch.Tensor, Any]] = {}
        #: Graph of a checkpointed function -> the node that runs it.
        self.runs: dict[fx.Graph, fx.Node] = {}
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
            with self.fake_mode or contextlib.nullcontext(), fresh_symbols(self.fake_mode):
                self._analyse_graph(self.gm)
                if self.aliases.check(self.gm.graph, self.is_broken):
                    self.tools.gaps[VIEWS_PASSED_ON] = (
                        "if the program writes one in place, gradients through its base are lost"
                    )
                for node, found in self.woven:
                    self._find_lifted(node, found)
        finally:
            torch.set_grad_enabled(grad)
        for node, found in self.woven:
            self._write(node, found)
        for graph in dict.fromkeys(node.graph for node, _ in self.woven):
            graph.lint()
        for module in self.gm.modules():
            if isinstance(module, fx.GraphModule) and self.woven:
                module.recompile()
        return [found for _, found in self.woven]

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
                self.runs[body.graph] = node
                self._analyse_graph(body)
            elif node.op in ("call_function", "call_method"):
                found = None if self._is_in_transform(node) else self._analyse(node)
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
            known = self.leaves.setdefault(source, [])
            if not all(known):  # One has died.
                self.tools.gaps[LEAVES] = "tools are not shown their values in compiled callables"
                return
            leaf: Known[bool] = Known()
            leaf.set(value, True)
            known.append(leaf)
        if is_weight(value) or self.tools.constant(value) is not None:
            example = node.meta["example_value"]
            self.real[id(example)] = example, value
            self.weights.add(id(value))
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
        return True

    # Analysis.

    def _analyse(self, node: fx.Node) -> Woven | None:
        target: Any = node.target
        if node.op == "call_method":
            target = getattr(torch.Tensor, str(target), None)
            if target is None:
                return None
        operator = OperatorMode.operator(target)
        if isinstance(target, HigherOrderOperator):
            if target.__name__ not in HIGHER_ORDER:
                raise CannotWeave(f"the graph has the higher-order operator {target}")
            operator = Operator(target, target, target.__name__)
        if target is INFERENCE:
            raise CannotWeave("it enters the inference mode")
        args, kwargs = self._given(node)
        called = called_of(node)
        if operator is not None:
            self._show(node, tree_map(self._again, _example(node)))
            plans = [self._operator(operator, target, args, kwargs, called, None, _example(node))]
            names = []
        elif _touches_tensors(args, kwargs):
            with (mode := _Analysing(self, called)):
                returned = target(*args, **kwargs)
            self._show(node, returned)
            plans, names = mode.plans, mode.names
        else:
            return None
        if not any(plans):
            return None
        if node.graph in self.runs and any(plan is not None and plan.on_host for plan in plans):
            raise CannotWeave("a routine on the host is inside activation checkpointing")
        return Woven(target, plans, names, operator is not None)

    def _given(self, node: fx.Node) -> Any:
        return fx.node.map_arg((node.args, node.kwargs), self._fake)

    def _fake(self, node: fx.Node) -> Any:
        if node.op == "get_attr" and "example_value" not in node.meta:
            owner: Any = node.graph.owning_module
            for name in str(node.target).split("."):
                owner = getattr(owner, name)
            if isinstance(owner, torch.Tensor) and self.fake_mode is not None:
                node.meta["example_value"] = self.fake_mode.from_tensor(owner)
            else:
                return owner
        return _example(node)  # None for the parts of context managers such as `record_function`.

    def _show(self, node: fx.Node, value: Any) -> None:
        """Let later operators get the value that analysis was shown here."""
        if _is_static(value):
            for old, new in zip(tree_leaves(_example(node)), tree_leaves(value), strict=False):
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
        if session.wants_backward and self._gradients(bound) and not misses_backward():
            raise CannotWeave(BACKWARD)  # The program itself enables gradients.
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
            if not self._gradients(bound) or (
                not arriving.replacement and does_nothing(operator, func, bound, outputs)
            ):
                arriving = leaving = Plan()  # In eager mode it has no node, and so no gradients.
            plan = OpPlan(self.tools.host, before, after, arriving, leaving, likes(outputs))
            self.aliases.operator(plan, bound, outputs)
            if plan:
                check(context, plan, bound, outputs, self._gradients(bound))
                varies = any(weight.varies for weight in context.weights.values())
                left = {"closed": _CLOSED, "weights": None if varies else context.weights}
                return plan
            return None
        finally:
            context.release()
            context.execution |= left  # For routines that have the context.

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

    def _gradients(self, bound: BoundCall) -> bool:
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in tensors_in(bound.values)
        )

    # Tensors that routines refer to.

    def _find_lifted(self, node: fx.Node, woven: Woven) -> None:
        """Run a node on fake tensors once, and note the real ones that its routines use."""
        fake_mode = self.fake_mode
        if fake_mode is None:
            return
        args, kwargs = self._given(node)
        used: dict[int, torch.Tensor] = {}

        def lift(tensor: torch.Tensor) -> Any:
            if isinstance(tensor, FakeTensor):
                return None
            if id(tensor) not in self.lifted:
                fake = fake_mode.from_tensor(tensor, static_shapes=True)
                self.lifted[id(tensor)] = tensor, fake
            used[id(tensor)] = tensor
            return self.lifted[id(tensor)][1]

        # Of what the run writes nothing may remain. What is the same tensor remains the same.
        copies: dict[int, Any] = {}

        def copied(value: Any) -> Any:
            if id(value) not in copies:
                copies[id(value)] = _copied(value)
            return copies[id(value)]

        with torch.set_grad_enabled(_records_gradients(node)):
            args, kwargs = tree_map(copied, (args, kwargs))
            found = woven.run(args, kwargs, lifted := Lifted(lift))
            sources, results = map(_differentiable, ((args, kwargs), found))
            if sources and results and woven.stages_gradients:
                seeds = [torch.ones_like(result) for result in results]
                torch.autograd.grad(results, sources, seeds, allow_unused=True)
        lifted.end()
        woven.lifted = list(used.values())

    # Writing.

    def _write(self, node: fx.Node, woven: Woven) -> None:
        lifted = [self._value(tensor, node) for tensor in woven.lifted]
        args, kwargs = tuple(node.args), dict(node.kwargs)
        self.tools.host.held.append(woven)
        node.op, node.target = "call_function", woven.function()
        node.args, node.kwargs = (args, kwargs, lifted), {}

    def _value(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        """Return the value of a tensor in the graph of a node, to be used there."""
        name, graph = f"_amanda_{list(self.lifted).index(id(tensor))}", node.graph
        call = self.runs.get(graph)
        if call is None:
            if not hasattr(self.gm, name):
                add_buffer(self.gm, name, tensor)
            with graph.inserting_before(node):
                found: fx.Node = graph.get_attr(name)
        else:
            # Only an argument of the function around may come from outside.
            given: list[fx.Node] = [one for one in graph.nodes if one.op == "placeholder"]
            inputs = {one.target: one for one in given}
            if name in inputs:
                return inputs[name]
            call.args = (*call.args, self._value(tensor, call))
            with graph.inserting_after(given[-1]):
                found = graph.placeholder(name)
        found.meta["example_value"] = self.lifted[id(tensor)][1]
        return found


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
    while frame is not None and frame.f_code is not _Weaving._analyse.__code__:
        if not is_own(frame.f_code):
            return (frame.f_code, frame.f_globals, frame.f_lasti) if _is_torchs(frame) else None
        frame = frame.f_back
    return None


def _is_torchs(frame: FrameType) -> bool:
    return is_torchs(frame.f_globals)


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


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


def _copied(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        copied = value.detach().clone()
        # The node may write it, which is an error for a leaf.
        return copied.requires_grad_().clone() if value.requires_grad else copied
    return value


def _differentiable(values: Any) -> list[torch.Tensor]:
    found = tree_leaves(values)
    return [one for one in found if isinstance(one, torch.Tensor) and one.requires_grad]


def _records_gradients(node: fx.Node) -> bool:
    found = [v for v in tree_leaves(_example(node)) if isinstance(v, torch.Tensor)]
    return any(value.requires_grad for value in found) or torch.is_grad_enabled()
