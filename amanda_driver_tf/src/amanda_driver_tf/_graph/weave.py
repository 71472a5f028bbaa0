"""`Weaver`: the plans of a body's ops turned into new nodes and new wiring.

Owns what is inserted at ops, and which version of a value each reader gets: a forward op's edited
inputs are seen by it and by its own gradient's ops and by nobody else, its edited outputs by all
but these. What happens at gradients, `gradients` says.
Long, since the versions of a value have to be seen together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from amanda_core.errors import UnsupportedError
from amanda_core.plan import Step
from amanda_driver_tf._graph.analysis import (
    Analysis,
    OpPlans,
    is_accumulation,
    is_container,
    is_operator,
    runs_functions,
)
from amanda_driver_tf._graph.body import BACK, Body, Node, Value, is_ref
from amanda_driver_tf._graph.conditions import operands
from amanda_driver_tf._graph.gradients import Gradients, Reader
from amanda_driver_tf._graph.groups import part_of, references_of, runs_of, selected_by
from amanda_driver_tf._graph.jacobians import no_gradient
from amanda_driver_tf._graph.kept import Kept
from amanda_driver_tf._graph.kernels import keeps_state
from amanda_driver_tf._graph.lost import unread_of
from amanda_driver_tf._graph.nodes import Host, Inlined, New
from amanda_driver_tf._graph.old_loops import OldLoops
from amanda_driver_tf._graph.records import Record, Records, children_of, is_symbolic
from amanda_driver_tf._graph.routines import (
    Flat,
    Layout,
    fold,
    of_shape,
    only_watching,
    replaced,
)
from amanda_driver_tf._graph.second import refuse_second
from amanda_driver_tf._graph.staging import trace
from amanda_driver_tf._graph.versions import (
    Differentiated,
    Foreign,
    Key,
    Seen,
    key_of,
    source_of,
)
from amanda_driver_tf._signature import signature_of

__all__ = ["Weaver"]

_IMPORT_FIRST = (
    "Import amanda before the graph is built, trace the function again, and compute Jacobians "
    "outside of functions or with experimental_use_pfor=False"
)


_CANNOT_FOLLOW = (
    "A value was edited whose gradient cannot follow: it was built before Amanda listened, by "
    "pfor, or by a tf.autodiff.ForwardAccumulator"
)
_INSIDE = (
    "The gradient of an edited op is computed in a loop, branch or function inside the one that "
    "ran the op"
)
_BESIDE = "Compute the gradient beside the op"
_SECOND_STATE = (
    "The input of an op was edited whose kernel keeps a state (a resource, or a place in a "
    "sequence of random numbers); the edited op would have a second state"
)
_EDIT_OUTPUT = "Edit its output, or replace it"


class Weaver:
    """Weaves the plans of one body.

    Args:
        body: The body; it is changed.
        analysis: Plans of its ops.
        foreign: The forward program of a body of gradients.
        call: Called for each node that runs functions, to have these woven.
        unpaired: Whether somebody who calls this computes gradients that nobody has noted.
        inside: Ids of ops whose gradients are computed in functions that this body runs.
        differentiated: Whether gradients go through the call of this body.

    Attributes:
        new: The new nodes.
        kept: What must run though nothing reads it.
        changed: Whether anything was inserted or rewired.
    """

    def __init__(
        self,
        body: Body,
        analysis: Analysis,
        foreign: Foreign | None = None,
        call: Callable[[Weaver, Node], None] | None = None,
        unpaired: bool = False,
        inside: Collection[int] = (),
        differentiated: bool = False,
    ) -> None:
        self.body = body
        self.new: list[New] = []
        self.kept = Kept(body)
        self.changed = False
        self.analysis = analysis
        self.foreign = foreign or Foreign()
        self._call = call
        self.records = Records.of(body.graph)
        #: Whether there are gradients of this body that nobody has noted: no edit is safe then.
        self.unpaired = unpaired or bool(self.records and self.records.has_unpaired())
        #: Ops with a gradient in this body of which only the pairing is known.
        self._named = {
            owner.forward.name
            for owner in map(self._owner, (node.op for node in body.nodes))
            if owner is not None and owner.is_named
        }
        self._differentiated_inside = inside
        self._visible: dict[Value, Value] = {}
        self._seen: dict[int, Seen] = {}
        self._done: set[int] = set()
        #: Gradient (by identity) -> the nodes that its function made; once it is needed.
        self._made_by: dict[int, list[Node]] = {}
        self._is_called_differentiated = differentiated
        self._is_differentiated = (
            differentiated or self.records is not None or bool(children_of(body.graph))
        )
        #: Gradients (by identity) whose ops read one tensor of which there are several versions.
        self.ambiguous: set[int] = set()
        #: What the tools asked for and do not get in this body -> why.
        self.unheard: dict[str, str] = {}
        #: New node (by identity) -> the node that it stands at.
        self._beside: dict[int, Node] = {}
        self.loops = OldLoops(self)
        self._gradients = Gradients(self)

    # Results.

    def weave(self) -> None:
        """Weave all nodes, and what the body returns."""
        is_function = self.body.fdef is not None
        running = self.body.reached(self.body.roots()) if is_function else set()
        for node in self.body.nodes:
            self.visit(node)
        for name, value in self.body.results.items():
            new = self.final(value)
            if new != value:
                self.body.results[name] = new
                self.changed = True
        if is_function:
            self.kept.settle(running, self.body.roots())
        self.loops.settle(self._beside)
        self._gradients.refuse_unread()

    def refuse_second(self, body: Body) -> None:
        """Refuse that `body` differentiates gradients of this one that other ops compute."""
        refuse_second(self._gradients.anew(), body)

    def has_new_gradients(self) -> bool:
        """Whether other ops compute gradients of this body than those that TensorFlow made."""
        return bool(self._gradients.anew())

    def seen(self, op: Any) -> Seen | None:
        """What a forward op saw and made; None if it is not in this body."""
        known = self._seen.get(id(op))
        if known is None:
            node = self.body.node_of(op)
            known = Seen(op, node.inputs, node.outputs()) if node is not None else None
        return known

    def final(self, value: Value) -> Value:
        """What is handed out where a value is fetched or returned."""
        return self._read(value)

    def visible(self, value: Value) -> Value:
        """What an ordinary reader of a value gets."""
        return self._visible.get(value, value)

    def differentiates(self, op: Any) -> bool:
        """Whether gradients go through an op that runs functions."""
        graphs = (self.body.graph, *children_of(self.body.graph))
        noted = [found for found in map(Records.of, graphs) if found is not None]
        return self._is_called_differentiated or any(found.of_op(op) for found in noted)

    def add(self, node: New) -> list[Value]:
        """Put a new node in."""
        self.new.append(node)
        self.changed = True
        return node.outputs()

    # Nodes.

    def visit(self, node: Any) -> None:
        """Weave a node, and what it reads before it; once."""
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
                and value.node.op_type not in BACK
            ]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            self._done.add(id(current))
            self._weave_node(current)

    def _weave_node(self, node: Node) -> None:
        owner = rerun_by = self._owner(node.op)
        if owner is not None and not self.analysis.is_backward(node.op):
            owner = None  # Run again by the gradient: a forward op like any other.
        if is_accumulation(node.op, self.records) and (
            owner is None or self._gradients.is_summed_within(node, owner)
        ):
            inputs = self._gradients.accumulated(node)
        elif owner is not None:
            inputs = [
                self.read_in_gradient(value, owner, Reader(node, slot))
                for slot, value in enumerate(node.inputs)
            ]
        else:
            inputs = [self._read_again(value, node, rerun_by) for value in node.inputs]
        self.loops.note(node, inputs)
        if not is_operator(node.op_type):
            self._wire(node, inputs)
            if self._call is not None:
                self._call(self, node)
            return
        if self._call is not None and runs_functions(node.op_type):
            self._call(self, node)
        plans = self.analysis.plans_of(node.op)
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
        return self.records.owner(op) if self.records is not None else None

    # Forward.

    def _forward(self, node: Node, plans: OpPlans, inputs: list[Value]) -> None:
        self._refuse_unread(node, plans)
        layout = self._layout(node)
        outputs = node.outputs()
        seen = Seen(node.op, inputs, outputs)
        seen.inputs = self._steps(
            f"{node.name}/before", plans.before.steps, inputs, layout, node, seen.before
        )
        self._wire(node, operands(node, seen.inputs, partial(self._add_beside, node)))
        if plans.before.replacement is not None:
            step = plans.before.replacement
            flat = replaced(step, layout, node.dtypes, self._shapes_wanted(node))
            unread = unread_of(node.op, self.body)
            if unread and plans.aligned_before.replacement is None:
                flat = no_gradient(flat, unread, step)
            everything = list(range(len(seen.inputs)))
            seen.replacement = Differentiated(flat, seen.inputs, everything, step)
            seen.outputs = self.insert(
                f"{node.name}/replacement", flat, seen.inputs, node.dtypes, step
            )
            outputs = seen.outputs
            if outputs:
                outputs[0].node.controls += node.controls
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

    def _add_beside(self, node: Node, made: New) -> list[Value]:
        """Put a new node in, which stands at a node."""
        self._beside[id(made)] = node
        return self.add(made)

    def _shapes_wanted(self, node: Node) -> list[Any]:
        """Shapes that the outputs of a replacement must have; None for any."""
        if not self._is_differentiated:
            return []
        return [None if self._is_handed_on(tensor) else tensor.shape for tensor in node.op.outputs]

    def _is_handed_on(self, tensor: Any) -> bool:
        """Whether only replaced ops read a tensor: these are differentiated as they stand.

        The gradient of what is returned or differentiated comes from elsewhere, built for a shape.
        """
        if key_of(tensor) in self._handed_out() or not self._is_replaced(tensor.op):
            return False
        readers = [
            op if owner is None else owner.forward
            for op in tensor.consumers()
            for owner in [self._owner(op)]
            if owner is None or owner.forward is not tensor.op
        ]
        return bool(readers) and all(map(self._is_replaced, readers))

    def _is_replaced(self, op: Any) -> bool:
        """Whether an op is replaced, and its gradient is that of what stands in its place."""
        if self.body.node_of(op) is None or not is_operator(op.type):
            return False
        plans = self.analysis.plans_of(op)
        return (
            plans is not None
            and plans.before.replacement is not None
            and plans.aligned_before.replacement is None
        )

    def _handed_out(self) -> set[Key]:
        """The tensors that are returned to whoever calls, or differentiated in this body."""
        runs = self.records.runs if self.records is not None else []
        differentiated = {key_of(y) for run in runs for y in run.targets if is_symbolic(y)}
        # A function returns what the user's does first, and then what gradients read.
        structure = getattr(self.body.graph, "structured_outputs", None)
        returned = [(id(value.node.op), value.slot) for value in self.body.results.values()]
        if structure is not None:
            outputs = tf.nest.flatten(structure, expand_composites=True)
            returned = returned[: sum(output is not None for output in outputs)]
        return differentiated | set(returned)

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
        differentiated: list[Differentiated] | None = None,
        behind: bool = False,
    ) -> list[Value]:
        """Insert steps at a point; neighbours that run on the host share a node."""
        values = list(values)
        references = references_of(node)
        for group in runs_of(steps):
            selected = selected_by(group, layout, len(values), all_of_them=behind)
            if not behind and node.op.op_def.allows_uninitialized_input:
                # There may be nothing yet that is referred to.
                selected = [index for index in selected if not is_ref(values[index].dtype)]
            inner = part_of(layout, selected)
            # The positions that the steps speak of are those of the whole.
            given = [values[index] for index in selected]
            dtypes = [value.dtype for value in given]
            frozen = [
                is_ref(value.dtype) and (behind or index in references)
                for index, value in zip(selected, given, strict=True)
            ]
            flat = fold(group, inner, dtypes, frozen)
            if self._is_differentiated:
                flat = self._of_shape(flat, group[0], node, selected, behind)
            if not behind and self._keeps_state(node):
                # Beside the op and not in front of it.
                flat = only_watching(flat, group[0], _SECOND_STATE, _EDIT_OUTPUT)
                self.insert(name, flat, given, dtypes, group[0], node, behind=True)
                continue
            named = node.op.name in self._named and self.loops.is_in_frame(node)
            if differentiated is not None and (self.unpaired or named):
                flat = only_watching(flat, group[0], _CANNOT_FOLLOW, _IMPORT_FIRST)
            elif differentiated is not None and node.op._id in self._differentiated_inside:
                flat = only_watching(flat, group[0], _INSIDE, _BESIDE)
            if differentiated is not None and group[0].action.autodiff:
                differentiated.append(Differentiated(flat, given, selected, group[0]))
            made = self.insert(name, flat, given, dtypes, group[0], node, behind)
            for index, fixed, new in zip(selected, frozen, made, strict=True):
                if not fixed:
                    values[index] = new
            if given and all(frozen):
                # Nobody reads it, as references go past it.
                if behind:
                    self.kept.add(made[0].node)
                else:
                    node.controls.append(made[0].node)
        return values

    def _of_shape(
        self, flat: Flat, step: Step, node: Node, selected: Sequence[int], behind: bool
    ) -> Flat:
        """A fold that keeps the shapes of some of the inputs or outputs of a node."""
        # Of the graph's own, as what tools put in the place of these has none.
        tensors = list(node.op.outputs if behind else node.op.inputs)
        passed: Collection[int] = ()
        if not step.action.autodiff:
            owner = self._owner(node.op)
            known = node.op.name not in self._named and not (owner is not None and owner.is_named)
            passed = self._gradients.passed_on(node.op, behind) if known else range(len(tensors))
        straight = [place for place, index in enumerate(selected) if index in passed]
        return of_shape(flat, [tensors[index].shape for index in selected], step, straight)

    def insert(
        self,
        name: str,
        flat: Flat,
        inputs: list[Value],
        dtypes: Sequence[int],
        step: Step,
        node: Node | None = None,
        behind: bool = False,
    ) -> list[Value]:
        """Insert what a step computes.

        Args:
            name: What the node is to be called.
            flat: The function.
            inputs: What it gets.
            dtypes: DataTypes of what it returns.
            step: The step, or the first of several.
            node: The node that it stands at, if at one.
            behind: Whether it stands behind that node.
        """
        plain = [dtype - 100 if is_ref(dtype) else dtype for dtype in dtypes]
        made: New
        if step.action.staged:
            made = Inlined(name, trace(name, flat, inputs), inputs, plain)
        else:
            made = Host(name, flat, inputs, plain)
        values = self.add(made)
        if node is not None:
            self._beside[id(made)] = node
        if node is not None and behind and (not inputs or node.op.op_def.is_stateful):
            made.controls.append(node.name)
            self.kept.add(made)
        elif node is not None and behind:
            self.kept.add_behind(made, node)
        elif node is not None:
            # What the node waits for has happened before anything that runs before it.
            made.controls += node.controls
            if not inputs:
                node.controls.append(made)
        return values

    def _keeps_state(self, node: Node) -> bool:
        """Whether a session would give a clone of a node another state."""
        return (
            self.body.fdef is None
            and keeps_state(node.op_type)
            and node.op._get_control_flow_context() is None
        )

    def _refuse_unread(self, node: Node, plans: OpPlans) -> None:
        """Refuse what needs more of a gradient than its ops' names tell."""
        steps = [*plans.before.steps, *plans.after.steps]
        needing = [
            plans.before.replacement,
            plans.aligned_before.replacement,
            *plans.aligned_before.steps,
            *plans.aligned_after.steps,
            *(step for step in steps if step.action.autodiff),
        ]
        step = next((step for step in needing if step is not None), None)
        if step is None:
            return
        if node.op._id in self._differentiated_inside:
            raise UnsupportedError(_INSIDE, where=step.where, fix=_BESIDE)
        if node.op.name in self._named or self.unpaired:
            raise UnsupportedError(
                "The gradient of this op was built before Amanda was imported, read from a file, "
                "or made by pfor or a tf.autodiff.ForwardAccumulator",
                where=step.where,
                fix=_IMPORT_FIRST,
            )

    # Which version a reader gets.

    def _read(self, value: Value, reader: Node | None = None) -> Value:
        if not isinstance(value.node, Node):
            return value
        gradient = self._gradients.read(value, reader)
        return gradient if gradient is not None else self.visible(value)

    def _read_again(self, value: Value, node: Node, owner: Record | None) -> Value:
        """What a forward op reads; if a gradient runs it, what it is the gradient of as seen there.

        Some gradients of gradients, as that of `FusedBatchNormGrad`, differentiate a formula.
        """
        if owner is not None and isinstance(value.node, Node):
            forward = owner.forward
            elsewhere = forward.graph is not self.body.graph
            made = value.node.op.outputs[value.slot]
            tensor = self.foreign.tensor(value) if elsewhere else made
            if any(tensor is each for each in (*forward.inputs, *forward.outputs)):
                return self.read_in_gradient(value, owner)
        return self._read(value, node)

    def read_in_gradient(self, value: Value, owner: Record, reader: Reader | None = None) -> Value:
        """What an op of a gradient function reads, or what that function returns.

        Args:
            value: What it reads as TensorFlow has wired it.
            owner: The gradient.
            reader: The op, and which input of it this is; None for what is returned.
        """
        if not isinstance(value.node, Node):
            return value
        elsewhere = owner.forward.graph is not self.body.graph
        tensor = self.foreign.tensor(value) if elsewhere else None
        gradient = self._gradients.in_function(value, owner, reader)
        if gradient is not None:
            same = tensor if elsewhere else value.node.op.outputs[value.slot]
            forward = owner.forward
            if same is not None and any(same is one for one in (*forward.inputs, *forward.outputs)):
                if tensor is not None:
                    read = self._read_foreign(value, tensor, owner)
                else:
                    read = self.version(same, owner) or self.visible(value)
                self._tell_apart(read, gradient, owner)
            return gradient
        if tensor is not None:
            return self._read_foreign(value, tensor, owner)
        led = self.loops.read(value, owner)
        if led is not None:
            return led
        if self._owner(value.node.op) is owner:
            return self.visible(value)
        made = value.node.op.outputs[value.slot]
        if value.node.is_argument and any(made is each for each in owner.forward.outputs):
            return self.visible(value)  # It is fed, whatever the op would make.
        version = self.version(made, owner)
        return version if version is not None else self.visible(value)

    def _tell_apart(self, version: Value, gradient: Value, owner: Record) -> None:
        """Note that a gradient of an op is a tensor that the op reads or makes, too.

        It is where a differentiation begins with it (`output_gradients`), and where a custom
        gradient returns it.
        """
        if self.plain(version) == self.plain(gradient):
            return
        if not _is_derivable(owner.forward):
            raise UnsupportedError(
                f"One tensor is a gradient that arrives at {owner.forward.name!r}, and what the op "
                "reads or makes; it was edited, and the op's gradient does not say which it means",
                fix="Begin with a tf.identity of it as output_gradients",
            )
        self.ambiguous.add(id(owner))

    def note_anew(self, owner: Record) -> None:
        """Note that the ops of a gradient run no more, and with them what is inserted at them."""
        if not self._made_by:
            for node in self.body.nodes:
                made_by = self._owner(node.op)
                if made_by is not None:
                    self._made_by.setdefault(id(made_by), []).append(node)
        for node in self._made_by.get(id(owner), ()):
            plans = self.analysis.plans_of(node.op) if is_operator(node.op_type) else None
            if plans is not None and (plans.before or plans.after):
                self.unheard[f"routines at {node.name!r}, a backward op"] = (
                    f"the gradient of {owner.forward.name!r} is computed anew, as it reads one "
                    "tensor that the op has seen in several versions"
                )

    def version(self, tensor: Any, owner: Record) -> Value | None:
        """The version of a tensor of this body that the op of a gradient saw, or None."""
        forward = self.body.node_of(owner.forward)
        if forward is not None:
            self.visit(forward)
        seen = self.seen(owner.forward)
        return self._version(tensor, owner, seen) if seen is not None else None

    def _read_foreign(self, value: Value, tensor: Any, owner: Record) -> Value:
        if tensor.dtype == tf.resource:
            return self.visible(value)  # There are no lists of them, which loops would need.
        seen = self.foreign.seen(owner.forward)
        wanted = self._version(tensor, owner, seen) if seen is not None else None
        if wanted is None or self.foreign.carries(tensor, wanted):
            return self.visible(value)
        self.changed = True
        return self.foreign.bring(wanted)

    def _version(self, tensor: Any, owner: Record, seen: Seen) -> Value | None:
        """The version of a tensor that the op of a gradient saw; None if it saw it not at all."""
        forward = owner.forward
        read_by = list(zip(forward.inputs, seen.inputs, strict=False))
        key, source = key_of(tensor), key_of(source_of(tensor))
        exact = [version for read, version in read_by if key_of(read) == key]
        # A gradient's loop is led one tensor for a value and for all identities of it.
        versions = [version for read, version in read_by if key_of(source_of(read)) == source]
        if len({self.plain(version) for version in versions}) > 1:
            # One tensor at several positions, edited differently: the gradient's ops do not say
            # which one they mean.
            if not _is_derivable(forward):
                if self._is_looped(forward) or len({self.plain(each) for each in exact}) != 1:
                    raise UnsupportedError(
                        f"{forward.name!r} reads a value twice, or an Identity of it, too; they "
                        "were edited differently, and its gradient does not say which it means",
                        fix="Edit them alike, or the ops that make the value",
                    )
                return exact[0]
            # The op is differentiated once more for it.
            self.ambiguous.add(id(owner))
        if versions:
            return (exact or versions)[0]
        for index, made in enumerate(forward.outputs[: len(seen.outputs)]):
            if key_of(made) == key_of(tensor):
                return seen.outputs[index]
        return None

    def _is_looped(self, forward: Any) -> bool:
        """Whether what a gradient reads of an op comes from the turns of a loop."""
        node = self.body.node_of(forward)
        return self.loops.is_in_frame(node) if node is not None else self.foreign.is_looped

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Whether an ordinary reader of a tensor gets the version that is wanted."""
        value = self.body.value_of(tensor)
        return value is not None and self.plain(self.visible(value)) == self.plain(wanted)

    def plain(self, value: Value) -> Value:
        """A value without `Identity` ops, which TensorFlow, too, takes for what they read."""
        while (
            isinstance(value.node, Node)
            and value.node.op_type == "Identity"
            and self.visible(value) == value
        ):
            value = value.node.inputs[0]
        return value

    # Backward ops.

    def _backward(self, node: Node, plans: OpPlans, inputs: list[Value]) -> None:
        layout = Layout([None] * len(inputs))
        inputs = self._steps(f"{node.name}/before", plans.before.steps, inputs, layout, node)
        self._wire(node, inputs)
        outputs = node.outputs()
        if plans.before.replacement is not None:
            step = plans.before.replacement
            flat = replaced(step, layout, node.dtypes)
            outputs = self.insert(f"{node.name}/replacement", flat, inputs, node.dtypes, step)
            if outputs:
                outputs[0].node.controls += node.controls
        layout = Layout([None] * len(outputs))
        after = self._steps(
            f"{node.name}/after", plans.after.steps, outputs, layout, node, behind=True
        )
        changed = [(old, new) for old, new in zip(node.outputs(), after, strict=True) if new != old]
        self._visible.update(changed)
        self._seen[id(node.op)] = Seen(node.op, inputs, outputs)


def _is_derivable(op: Any) -> bool:
    """Whether the gradient of an op can be derived anew, for this op alone.

    The functions that it runs, and gradient functions of its own, hold tensors of its graph.
    """
    return not is_container(op.type) and "_gradient_op_type" not in op.node_def.attr
