"""`Weaver`: the plans of a body's ops turned into new nodes and new wiring.

Owns which version of a value each reader gets. A forward op's edited inputs are seen by it and by
its own gradient's ops and by nobody else; its edited outputs by all but these. Gradients are
followed from contribution to contribution through the records, since one tensor may be the gradient
of several values. What cannot be told apart is refused, for a wrong gradient would be silent. Over
400 lines: the rules refer to one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.python.framework import ops

from amanda_core.errors import UnsupportedError
from amanda_core.plan import Step
from amanda_driver_tf._graph.analysis import Analysis, OpPlans, is_accumulation, is_operator
from amanda_driver_tf._graph.body import Body, Node, Value, is_ref
from amanda_driver_tf._graph.nodes import Host, Inlined, New
from amanda_driver_tf._graph.records import Record, Records, children_of, components
from amanda_driver_tf._graph.routines import (
    Flat,
    Layout,
    fold,
    of_shape,
    only_watching,
    replaced,
    replaced_backward,
    vector_jacobian,
)
from amanda_driver_tf._graph.staging import static_shape, trace, trace_gradient
from amanda_driver_tf._signature import signature_of

__all__ = ["Foreign", "Seen", "Weaver"]

_Key = tuple[int, int]


def _key(tensor: Any) -> _Key:
    return id(tensor.op), tensor.value_index


_IMPORT_FIRST = (
    "Import amanda before the graph is built, trace the function again, and compute Jacobians "
    "outside of functions or with experimental_use_pfor=False"
)


class Seen:
    """What one forward op saw and made: the values that its gradient's ops are to read.

    Attributes:
        inputs: Its inputs as it ran on them.
        outputs: Its outputs before anything was inserted behind it.
        given: Inputs of each inserted step that is differentiated, with the step's function.
    """

    __slots__ = ("after", "before", "inputs", "op", "outputs", "replacement")

    def __init__(self, op: Any, inputs: list[Value], outputs: list[Value]) -> None:
        self.op = op
        self.inputs, self.outputs = inputs, outputs
        #: Differentiated steps before and after the op: (function, inputs, positions among these).
        self.before: list[tuple[Flat, list[Value], list[int]]] = []
        self.after: list[tuple[Flat, list[Value], list[int]]] = []
        self.replacement: tuple[Flat, list[Value]] | None = None


class Foreign:
    """Access to a forward program that stands in another body; the base knows none."""

    def tensor(self, value: Value) -> Any:
        """The forward tensor that a value of this body carries, or None."""
        return None

    def seen(self, op: Any) -> Seen | None:
        """What an op of the forward body saw and made, or None if it is not there."""
        return None

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Whether the version of a forward tensor that this body is given is the wanted one."""
        return True

    def bring(self, value: Value) -> Value:
        """A value of the forward body as a value of this one."""
        raise NotImplementedError


class Weaver:
    """Weaves the plans of one body.

    Args:
        body: The body; it is changed.
        analysis: Plans of its ops.
        foreign: The forward program of a body of gradients.
        call: Called for each node that runs functions, to have these woven.
        unpaired: Whether somebody who calls this computes gradients that nobody has noted.
        around: The graphs that run this body in a loop, branch or call.

    Attributes:
        new: The new nodes.
        kept: Those among them that must run though nothing reads them.
        changed: Whether anything was inserted or rewired.
    """

    def __init__(
        self,
        body: Body,
        analysis: Analysis,
        foreign: Foreign | None = None,
        call: Callable[[Weaver, Node], None] | None = None,
        unpaired: bool = False,
        around: tuple[Any, ...] = (),
    ) -> None:
        self.body = body
        self.new: list[New] = []
        self.kept: list[New] = []
        self.changed = False
        self._analysis = analysis
        self._foreign = foreign or Foreign()
        self._around = around
        self._call = call
        self._records = Records.of(body.graph)
        #: Whether there are gradients of this body that nobody has noted: no edit is safe then.
        self.unpaired = unpaired or bool(self._records and self._records.has_unpaired())
        self._visible: dict[Value, Value] = {}
        self._seen: dict[int, Seen] = {}
        self._done: set[int] = set()
        #: Number of an eager tensor, such as a variable's handle -> the argument that it is here.
        self._captured = {
            ops.tensor_id(outer): _key(inner) for outer, inner in getattr(body.graph, "captures", ())
        }
        self._is_differentiated = self._records is not None or bool(children_of(body.graph))
        self._ambiguous: set[int] = set()
        self._out: dict[int, list[list[Value] | None]] = {}
        self._in: dict[int, list[list[Value] | None]] = {}
        self._find_targets()

    # Results.

    def weave(self) -> None:
        """Weave all nodes, and what the body returns."""
        for node in self.body.nodes:
            self._visit(node)
        for name, value in self.body.results.items():
            new = self.final(value)
            if new != value:
                self.body.results[name] = new
                self.changed = True

    def seen(self, op: Any) -> Seen | None:
        """What a forward op saw and made; None if it is not in this body."""
        known = self._seen.get(id(op))
        if known is None:
            node = self.body.node_of(op)
            known = Seen(op, node.inputs, node.outputs()) if node is not None else None
        return known

    def final(self, value: Value) -> Value:
        """What is handed out where a value is fetched or returned."""
        return self._read(value, None)

    def visible(self, value: Value) -> Value:
        """What an ordinary reader of a value gets."""
        return self._visible.get(value, value)

    def add(self, node: New) -> list[Value]:
        """Put a new node in."""
        self.new.append(node)
        self.changed = True
        return node.outputs()

    # Nodes.

    def _visit(self, node: Any) -> None:
        stack = [node]
        while stack:
            current = stack[-1]
            if not isinstance(current, Node) or current.is_argument or id(current) in self._done:
                stack.pop()
                continue
            waiting = [
                value.node
                for value in current.inputs
                if isinstance(value.node, Node)
                and not value.node.is_argument
                and id(value.node) not in self._done
                and value.node.op_type != "NextIteration"
            ]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            self._done.add(id(current))
            self._weave_node(current)

    def _weave_node(self, node: Node) -> None:
        owner = self._owner(node.op)
        if owner is not None and not self._analysis.is_backward(node.op):
            owner = None  # Run again by the gradient: a forward op like any other.
        if owner is None and is_accumulation(node.op, self._records):
            inputs = self._accumulated(node)
        else:
            inputs = [self._read(value, owner) for value in node.inputs]
        if not is_operator(node.op_type):
            self._wire(node, inputs)
            if self._call is not None:
                self._call(self, node)
            return
        plans = self._analysis.plans_of(node.op)
        if plans is None or not (plans.before or plans.after):
            self._wire(node, inputs)
        elif plans.context.is_backward():
            self._backward(node, plans, inputs)
        else:
            self._forward(node, plans, inputs)
        if plans is not None and not (plans.before or plans.after):
            self._refuse_unread(node, plans)

    def _wire(self, node: Node, inputs: list[Value]) -> None:
        if inputs != node.inputs:
            node.inputs = inputs
            self.changed = True

    def _owner(self, op: Any) -> Record | None:
        return self._records.owner(op) if self._records is not None else None

    # Forward.

    def _forward(self, node: Node, plans: OpPlans, inputs: list[Value]) -> None:
        self._refuse_old_loops(node, plans)
        self._refuse_unread(node, plans)
        layout = self._layout(node)
        outputs = node.outputs()
        seen = Seen(node.op, inputs, outputs)
        seen.inputs = self._steps(
            f"{node.name}/before", plans.before.steps, inputs, layout, node, seen.before
        )
        self._wire(node, seen.inputs)
        if plans.before.replacement is not None:
            step = plans.before.replacement
            flat = replaced(step, layout, node.dtypes)
            seen.replacement = (flat, seen.inputs)
            seen.outputs = self._insert(
                f"{node.name}/replacement", flat, seen.inputs, node.dtypes, step
            )
            outputs = seen.outputs
        after = self._steps(
            f"{node.name}/after",
            plans.after.steps,
            outputs,
            Layout([None] * len(outputs)),
            node,
            seen.after,
            behind=True,
        )
        for original, new in zip(node.outputs(), after, strict=True):
            if new != original:
                self._visible[original] = new
        self._seen[id(node.op)] = seen

    def _layout(self, node: Node) -> Layout:
        signature = signature_of(node.op_type)
        if signature is None:
            return Layout([None] * len(node.inputs))
        return Layout(signature.lengths(node.op.get_attr))

    def _steps(
        self,
        name: str,
        steps: Sequence[Step],
        values: list[Value],
        layout: Layout,
        node: Node,
        differentiated: list[tuple[Flat, list[Value], list[int]]] | None = None,
        behind: bool = False,
    ) -> list[Value]:
        """Insert steps at a point; neighbours that run on the host share a node."""
        values = list(values)
        for group in _runs_of(steps):
            selected = _selected(group, layout, len(values), all_of_them=behind)
            inner = _part(layout, selected)
            # The positions that the steps speak of are those of the whole.
            given = [values[index] for index in selected]
            dtypes = [value.dtype for value in given]
            frozen = [is_ref(dtype) for dtype in dtypes]
            flat = fold(group, inner, dtypes, frozen)
            if self._is_differentiated:
                flat = of_shape(flat, [static_shape(value) for value in given], group[0])
            if differentiated is not None and self.unpaired:
                flat = only_watching(flat, group[0], _IMPORT_FIRST)
            if differentiated is not None and group[0].action.autodiff:
                differentiated.append((flat, given, selected))
            made = self._insert(name, flat, given, dtypes, group[0], node, behind)
            for index, old, new in zip(selected, given, made, strict=True):
                if not is_ref(old.dtype):
                    values[index] = new
        return values

    def _insert(
        self,
        name: str,
        flat: Flat,
        inputs: list[Value],
        dtypes: Sequence[int],
        step: Step,
        node: Node | None = None,
        behind: bool = False,
    ) -> list[Value]:
        plain = [dtype - 100 if is_ref(dtype) else dtype for dtype in dtypes]
        made: New
        if step.action.staged:
            made = Inlined(name, trace(name, flat, inputs), inputs, plain)
        else:
            made = Host(name, flat, inputs, plain)
        values = self.add(made)
        if node is not None and behind and (not inputs or node.op.op_def.is_stateful):
            made.controls.append(node.name)
            self.kept.append(made)
        elif node is not None and not behind and not inputs:
            node.controls.append(made)  # type: ignore[arg-type]
        return values

    def _refuse_old_loops(self, node: Node, plans: OpPlans) -> None:
        flow = node.op._get_control_flow_context()
        while flow is not None and not flow.IsWhileContext():
            flow = flow.outer_context
        if flow is not None and self._records is not None and self._records.of_op(node.op):
            raise UnsupportedError(
                "An op inside a while loop of TensorFlow 1 was edited, and its gradient is part of "
                "the graph",
                where=plans.context.where,
                fix="Call tf.compat.v1.enable_control_flow_v2() before the graph is built",
            )

    def _refuse_unread(self, node: Node, plans: OpPlans) -> None:
        """Refuse what needs more of a gradient than its ops' names tell."""
        steps = [*plans.before.steps, *plans.after.steps]
        needs_gradient = (
            plans.aligned_before
            or plans.aligned_after
            or plans.before.replacement
            or any(step.action.autodiff for step in steps)
        )
        named = self._records is not None and node.op.name in self._records.read_from_names()
        if needs_gradient and (named or self.unpaired):
            raise UnsupportedError(
                "The gradient of this op was built before Amanda was imported, or read from a file",
                where=plans.context.where,
                fix=_IMPORT_FIRST,
            )

    def _refuse_inner(self, owner: Record) -> None:
        """Refuse the gradient, in a loop, of an edited op that has run ahead of the loop."""
        if not any(graph is owner.forward.graph for graph in self._around):
            return
        plans = self._analysis.plans_of(owner.forward)
        if plans is not None and plans.context.is_forward() and (plans.before or plans.after):
            raise UnsupportedError(
                "The gradient of an edited op is computed in a loop, branch or function inside the "
                "one that ran the op",
                where=plans.context.where,
                fix="Compute the gradient beside the op",
            )

    # Which version a reader gets.

    def _read(self, value: Value, owner: Record | None) -> Value:
        if not isinstance(value.node, Node):
            return value
        if owner is not None:
            return self._read_in_gradient(value, owner)
        of = self._results.get(value)
        found = self._contributors(value, of) or self._last(self._contributors(value, None))
        gradient = self._agreed(value, found)
        return gradient if gradient is not None else self.visible(value)

    def _read_in_gradient(self, value: Value, owner: Record) -> Value:
        """What an op of a gradient function reads."""
        self._refuse_inner(owner)
        tensor = self._foreign.tensor(value)
        if tensor is not None:
            return self._read_foreign(value, tensor, owner)
        key = (id(value.node.op), value.index)
        for position, gradient in enumerate(owner.out_grads):
            for part, arriving in enumerate(components(gradient)):
                if _key(arriving) == key:
                    arrived = self._arriving(owner)[position]
                    return arrived[part] if arrived is not None else self.visible(value)
        if self._owner(value.node.op) is owner:
            return self.visible(value)
        forward = self.body.node_of(owner.forward)
        if forward is not None:
            self._visit(forward)
        seen = self.seen(owner.forward)
        version = self._version(value.node.op.outputs[value.index], owner, seen) if seen else None
        return version if version is not None else self.visible(value)

    def _read_foreign(self, value: Value, tensor: Any, owner: Record) -> Value:
        seen = self._foreign.seen(owner.forward)
        wanted = self._version(tensor, owner, seen) if seen is not None else None
        if wanted is None or self._foreign.carries(tensor, wanted):
            return self.visible(value)
        self.changed = True
        return self._foreign.bring(wanted)

    def _version(self, tensor: Any, owner: Record, seen: Seen) -> Value | None:
        """The version of a tensor that the op of a gradient saw; None if that has not to do with it."""
        forward, key = owner.forward, _key(_source(tensor))
        versions = [
            seen.inputs[index]
            for index, read in enumerate(forward.inputs)
            if index < len(seen.inputs) and _key(_source(read)) == key
        ]
        if any(version != versions[0] for version in versions):
            # One tensor at several positions, edited differently: the gradient's ops do not say
            # which one they mean. The op is differentiated once more for it.
            self._ambiguous.add(id(owner))
        if versions:
            return versions[0]
        for index, made in enumerate(forward.outputs[: len(seen.outputs)]):
            if _key(made) == _key(tensor):
                return seen.outputs[index]
        return None

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Whether an ordinary reader of a tensor gets the version that is wanted."""
        value = self.body.value_of(tensor)
        return value is not None and self._plain(self.visible(value)) == self._plain(wanted)

    def _plain(self, value: Value) -> Value:
        # TensorFlow, too, takes what an Identity reads for what it is.
        while (
            isinstance(value.node, Node)
            and value.node.op_type == "Identity"
            and self.visible(value) == value
        ):
            value = value.node.inputs[0]
        return value

    # Gradients, from contribution to contribution.

    def _find_targets(self) -> None:
        """Note which tensors a gradient is the whole gradient of."""
        #: Gradients that are the result of a differentiation -> the tensors that it was asked for.
        self._results: dict[Value, list[_Key]] = {}
        #: These, and gradients that are given to gradient functions.
        self._targets: dict[Value, list[_Key]] = {}
        if self._records is None:
            return
        for run in self._records.runs:
            for gradient, source in zip(run.results, run.sources, strict=False):
                self._note(self._results, gradient, source)
                self._note(self._targets, gradient, source)
        for found in self._records.records:
            for gradient, output in zip(found.out_grads, found.outputs, strict=False):
                self._note(self._targets, gradient, output)

    def _note(self, targets: dict[Value, list[_Key]], gradient: Any, of: Any) -> None:
        key = self._key(of)
        for tensor in components(gradient):
            value = self.body.value_of(tensor)
            if value is not None and key is not None:
                targets.setdefault(value, []).append(key)

    def _key(self, tensor: Any) -> _Key | None:
        """What tells the tensors of the forward program apart; None for what is no tensor."""
        if isinstance(tensor, ops.EagerTensor):
            return self._captured.get(ops.tensor_id(tensor))
        return _key(tensor) if hasattr(tensor, "value_index") else None

    def _accumulated(self, node: Node) -> list[Value]:
        """The inputs of an op that adds up the contributions to one gradient."""
        of = self._targets.get(Value(node, 0))
        result = []
        turns: dict[Value, int] = {}
        for value in node.inputs:
            found = self._contributors(value, of)
            turn = turns[value] = turns.get(value, -1) + 1
            if len(found) == node.inputs.count(value):
                # One tensor is several of the contributions; they come in the order of the ops.
                found = [found[turn]]
            gradient = self._agreed(value, found)
            result.append(gradient if gradient is not None else self.visible(value))
        return result

    def _contributors(self, value: Value, of: list[_Key] | None) -> list[tuple[Record, int]]:
        """The gradients that a tensor is: of the tensors `of` if these are known, else of any."""
        if self._records is None or value.node.is_argument:
            return []
        found = self._records.contributions().get((id(value.node.op), value.index), [])
        return [each for each in found if of is None or self._key_of(*each) in of]

    def _key_of(self, owner: Record, position: int) -> _Key | None:
        if position >= len(owner.inputs):
            return None
        return self._key(owner.inputs[position])

    def _last(self, found: list[tuple[Record, int]]) -> list[tuple[Record, int]]:
        """Without those that were passed on to another one of them."""
        passed = {self._key(output) for owner, _ in found for output in owner.outputs}
        return [each for each in found if self._key_of(*each) not in passed] or found

    def _agreed(self, value: Value, found: list[tuple[Record, int]]) -> Value | None:
        """The version of a tensor that it has as all of these gradients; None if it is none."""
        versions = {self._contribution(*each, value) for each in found}
        if len(versions) > 1:
            names = sorted({owner.forward.name for owner, _ in found})
            raise UnsupportedError(
                f"One tensor is the gradient of several inputs, of {', '.join(names)}; they were "
                "edited differently, and its reader does not say which one it means",
                fix="Edit the gradient at the outputs instead, or at all of these inputs alike",
            )
        return versions.pop() if versions else None

    def _contribution(self, owner: Record, position: int, value: Value) -> Value:
        new = self._contributions(owner)[position]
        parts = components(owner.in_grads[position])
        index = next(i for i, t in enumerate(parts) if _key(t) == (id(value.node.op), value.index))
        return new[index] if new is not None else self.visible(value)

    def _arriving(self, owner: Record) -> list[list[Value] | None]:
        """The gradients that an op's gradient function gets, those inserted ahead of it done."""
        known = self._out.get(id(owner))
        if known is not None:
            return known
        self._refuse_inner(owner)
        arrived: list[list[Value] | None] = []
        for position, gradient in enumerate(owner.out_grads):
            values = [self.body.value_of(tensor) for tensor in components(gradient)]
            if not values or any(value is None for value in values):
                arrived.append(None)
                continue
            of = None
            if position < len(owner.outputs):
                of = [key] if (key := self._key(owner.outputs[position])) is not None else []
            parts = []
            for value in values:
                assert value is not None
                self._visit(value.node)
                part = self._agreed(value, self._contributors(value, of))
                parts.append(part if part is not None else self.visible(value))
            arrived.append(parts)
        plans = self._plans_of(owner)
        if plans is not None:
            arrived = self._insert_at_gradients(
                owner, plans.aligned_before.steps, arrived, "grad_outputs", hide=owner.missing
            )
            seen = self._seen_of(owner)
            for flat, given, selected in reversed(seen.after if seen is not None else []):
                arrived = self._differentiate(owner, flat, given, selected, arrived)
        self._out[id(owner)] = arrived
        return arrived

    def _contributions(self, owner: Record) -> list[list[Value] | None]:
        """What an op contributes to its inputs' gradients, those inserted behind it done."""
        known = self._in.get(id(owner))
        if known is not None:
            return known
        plans = self._plans_of(owner)
        seen = self._seen_of(owner)
        arrived = self._arriving(owner)
        replacement = plans.aligned_before.replacement if plans is not None else None
        made: list[list[Value] | None]
        if replacement is not None:
            made = self._replace_backward(owner, replacement, arrived)
        elif seen is not None and seen.replacement is not None:
            made = self._through(owner, *seen.replacement, arrived)
        else:
            made = [self._returned(owner, gradient) for gradient in owner.in_grads]
            if id(owner) in self._ambiguous and seen is not None:
                made = self._differentiate_op(owner, seen, arrived)
        for flat, given, selected in reversed(seen.before if seen is not None else []):
            made = self._differentiate(owner, flat, given, selected, made)
        if plans is not None:
            made = self._insert_at_gradients(
                owner, plans.aligned_after.steps, made, "grad_inputs", hide=frozenset()
            )
        self._in[id(owner)] = made
        return made

    def _returned(self, owner: Record, gradient: Any) -> list[Value] | None:
        parts = []
        for tensor in components(gradient):
            value = self.body.value_of(tensor)
            if value is None:
                return None
            self._visit(value.node)
            parts.append(self._read_in_gradient(value, owner))
        return parts or None

    def _plans_of(self, owner: Record) -> OpPlans | None:
        if not is_operator(owner.forward.type):
            return None
        plans = self._analysis.plans_of(owner.forward)
        # Gradients of gradients have no aligned view of their own.
        return plans if plans is not None and plans.context.is_forward() else None

    def _seen_of(self, owner: Record) -> Seen | None:
        if owner.forward.graph is self.body.graph:
            return self.seen(owner.forward)
        seen = self._foreign.seen(owner.forward)
        if seen is None or not (seen.before or seen.after or seen.replacement):
            return seen
        brought = Seen(seen.op, seen.inputs, seen.outputs)
        bring = self._foreign.bring
        brought.before = [(f, [bring(v) for v in given], s) for f, given, s in seen.before]
        brought.after = [(f, [bring(v) for v in given], s) for f, given, s in seen.after]
        if seen.replacement is not None:
            flat, given = seen.replacement
            brought.replacement = (flat, [bring(value) for value in given])
        return brought

    def _insert_at_gradients(
        self,
        owner: Record,
        steps: Sequence[Step],
        gradients: list[list[Value] | None],
        where: str,
        hide: frozenset[int],
    ) -> list[list[Value] | None]:
        for step in steps:
            lengths = self._gradient_lengths(owner, where)
            shown = [None if i in hide else parts for i, parts in enumerate(gradients)]
            layout, flat_values, places = _gradient_layout(lengths, shown, owner, where)
            positions = step.action.positions
            chosen = range(len(lengths)) if positions is None else positions
            if not any(
                layout.group([True] * len(flat_values))[p] is not None
                for p in chosen
                if p < len(lengths)
            ):
                continue
            dtypes = [value.dtype for value in flat_values]
            flat = fold([step], layout, dtypes, [False] * len(dtypes))
            made = self._insert(f"{owner.forward.name}/{where}", flat, flat_values, dtypes, step)
            gradients = [list(parts) if parts is not None else None for parts in gradients]
            for (index, part), value in zip(places, made, strict=True):
                parts = gradients[index]
                assert parts is not None
                parts[part] = value
        return gradients

    def _gradient_lengths(self, owner: Record, where: str) -> list[int | None]:
        if where == "grad_outputs":
            return [None] * len(owner.out_grads)
        signature = signature_of(owner.forward.type)
        if signature is None or len(owner.in_grads) != len(owner.forward.inputs):
            return [None] * len(owner.in_grads)
        return list(signature.lengths(owner.forward.get_attr))

    def _replace_backward(
        self, owner: Record, step: Step, arrived: list[list[Value] | None]
    ) -> list[list[Value] | None]:
        shown = [None if i in owner.missing else parts for i, parts in enumerate(arrived)]
        given, values, _ = _gradient_layout(
            self._gradient_lengths(owner, "grad_outputs"), shown, owner, "grad_outputs"
        )
        returned = [self._dense(gradient) for gradient in owner.in_grads]
        made_layout, targets, places = _gradient_layout(
            self._gradient_lengths(owner, "grad_inputs"), returned, owner, "grad_inputs"
        )
        dtypes = [value.dtype for value in targets]
        flat = replaced_backward(step, given, made_layout, dtypes)
        made = self._insert(f"{owner.forward.name}/backward", flat, values, dtypes, step)
        return _placed(len(owner.in_grads), places, made)

    def _dense(self, gradient: Any) -> list[Value] | None:
        parts = [self.body.value_of(tensor) for tensor in components(gradient)]
        return [part for part in parts if part is not None] or None

    def _through(
        self, owner: Record, flat: Flat, given: list[Value], arrived: list[list[Value] | None]
    ) -> list[list[Value] | None]:
        """The gradient of a replacement of the op, differentiated as it is written."""
        result: list[list[Value] | None] = [None] * len(owner.in_grads)
        wanted = [
            index
            for index, value in enumerate(given[: len(owner.in_grads)])
            if _is_real(value.dtype) and owner.in_grads[index] is not None
        ]
        ahead = [index for index, parts in enumerate(arrived) if parts is not None]
        made = self._derivative(owner, flat, given, ahead, arrived, wanted)
        for index, value in zip(wanted, made, strict=True):
            result[index] = [value]
        return result

    def _differentiate_op(
        self, owner: Record, seen: Seen, arrived: list[list[Value] | None]
    ) -> list[list[Value] | None]:
        """The gradient of an op as it ran, by its own gradient function called once more."""
        ahead = [i for i, parts in enumerate(arrived) if parts is not None and len(parts) == 1]
        wanted = [i for i, gradient in enumerate(owner.in_grads) if gradient is not None]
        inputs = [self._here(owner, value) for value in seen.inputs]
        values = [*inputs, *((arrived[index] or [])[0] for index in ahead)]
        name = f"{owner.forward.name}/gradient"
        function = trace_gradient(name, owner.forward, ahead, wanted, values)
        dtypes = [inputs[index].dtype for index in wanted]
        made = self.add(Inlined(name, function, values, dtypes))
        result: list[list[Value] | None] = [None] * len(owner.in_grads)
        for index, value in zip(wanted, made, strict=True):
            result[index] = [value]
        return result

    def _here(self, owner: Record, value: Value) -> Value:
        if owner.forward.graph is self.body.graph:
            return value
        return self._foreign.bring(value)

    def _differentiate(
        self,
        owner: Record,
        flat: Flat,
        given: list[Value],
        selected: list[int],
        gradients: list[list[Value] | None],
    ) -> list[list[Value] | None]:
        """Gradients behind a step as gradients ahead of it; it maps the `selected` to themselves."""
        result = list(gradients)
        ahead = [
            place
            for place, index in enumerate(selected)
            if index < len(gradients) and gradients[index] is not None
        ]
        wanted = [place for place in ahead if _is_real(given[place].dtype)]
        arrived = [gradients[index] if index < len(gradients) else None for index in selected]
        made = self._derivative(owner, flat, given, ahead, arrived, wanted)
        for place, value in zip(wanted, made, strict=True):
            result[selected[place]] = [value]
        return result

    def _derivative(
        self,
        owner: Record,
        flat: Flat,
        given: list[Value],
        ahead: list[int],
        arrived: Sequence[list[Value] | None],
        wanted: list[int],
    ) -> list[Value]:
        """Gradients of the `wanted` inputs of a function from those of its outputs `ahead`."""
        if not ahead or not wanted:
            return []
        values: list[Value] = []
        for index in ahead:
            parts = arrived[index] or []
            if len(parts) != 1:
                raise UnsupportedError(
                    f"The gradient of {owner.forward.name!r} is tf.IndexedSlices, and what was "
                    "inserted at the op is to be differentiated",
                    fix="Leave autodiff_enabled() out for this op",
                )
            values += parts

        def forward(tensors: list[Any]) -> list[Any]:
            outputs = flat(tensors)
            return [outputs[index] for index in ahead]

        derivative = vector_jacobian(forward, len(given))

        def run(tensors: list[Any]) -> list[Any]:
            found = derivative(tensors)
            return [found[index] for index in wanted]

        dtypes = [given[index].dtype for index in wanted]
        return self.add(Host(f"{owner.forward.name}/derivative", run, [*given, *values], dtypes))

    # Backward ops.

    def _backward(self, node: Node, plans: OpPlans, inputs: list[Value]) -> None:
        layout = Layout([None] * len(inputs))
        inputs = self._steps(f"{node.name}/before", plans.before.steps, inputs, layout, node)
        self._wire(node, inputs)
        outputs = node.outputs()
        if plans.before.replacement is not None:
            step = plans.before.replacement
            flat = replaced(step, layout, node.dtypes)
            outputs = self._insert(f"{node.name}/replacement", flat, inputs, node.dtypes, step)
        layout = Layout([None] * len(outputs))
        after = self._steps(
            f"{node.name}/after", plans.after.steps, outputs, layout, node, behind=True
        )
        changed = [(old, new) for old, new in zip(node.outputs(), after, strict=True) if new != old]
        self._visible.update(changed)
        self._seen[id(node.op)] = Seen(node.op, inputs, outputs)


def _source(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


# Of the DataTypes those that are differentiated: float, double, complex, half, bfloat16.
_REAL = frozenset({1, 2, 8, 14, 18, 19})


def _is_real(dtype: int) -> bool:
    return dtype in _REAL


def _runs_of(steps: Sequence[Step]) -> list[list[Step]]:
    """Neighbouring steps that can share a node."""
    groups: list[list[Step]] = []
    for step in steps:
        alone = step.action.staged or step.action.autodiff
        if (
            groups
            and not alone
            and not (groups[-1][-1].action.staged or groups[-1][-1].action.autodiff)
        ):
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _selected(steps: Sequence[Step], layout: Layout, count: int, all_of_them: bool) -> list[int]:
    """Indices of the flat tensors that a node takes."""
    if all_of_them or any(step.action.positions is None for step in steps):
        return list(range(count))
    positions = {p for step in steps for p in step.action.positions or ()}
    chosen: list[int] = []
    start = 0
    for position, length in enumerate(layout.lengths):
        stop = start + (1 if length is None else length)
        if position in positions:
            chosen.extend(range(start, stop))
        start = stop
    return chosen


def _part(layout: Layout, selected: Sequence[int]) -> Layout:
    """The layout with only some of the tensors present; positions stay what they are."""
    chosen = set(selected)
    return Layout(layout.lengths, [index in chosen for index in range(layout.total)])


def _gradient_layout(
    lengths: Sequence[int | None],
    gradients: Sequence[list[Value] | None],
    owner: Record,
    where: str,
) -> tuple[Layout, list[Value], list[tuple[int, int]]]:
    """Layout of gradients, their tensors, and of each tensor the gradient and part that it is."""
    of = owner.out_grads if where == "grad_outputs" else owner.in_grads
    new_lengths: list[int | None] = []
    slices: set[int] = set()
    present: list[bool] = []
    values: list[Value] = []
    places: list[tuple[int, int]] = []
    start = 0
    for position, length in enumerate(lengths):
        indices = range(start, start + (1 if length is None else length))
        start = indices.stop
        parts_of = len(components(of[indices[0]])) if length is None else 1
        if parts_of > 1:
            slices.add(position)
            new_lengths.append(parts_of)
        else:
            new_lengths.append(length)
        for index in indices:
            parts = gradients[index] if index < len(gradients) else None
            for part in range(parts_of if position in slices else 1):
                there = parts is not None and part < len(parts)
                present.append(there)
                if there:
                    assert parts is not None
                    values.append(parts[part])
                    places.append((index, part))
    return Layout(new_lengths, present, frozenset(slices)), values, places


def _placed(
    count: int, places: Sequence[tuple[int, int]], values: Sequence[Value]
) -> list[list[Value] | None]:
    result: list[list[Value] | None] = [None] * count
    for (index, _), value in zip(places, values, strict=True):
        result[index] = [*(result[index] or []), value]
    return result
