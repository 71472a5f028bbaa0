"""`Insertions`: inserts the planned steps at an op as new nodes.

Owns where these nodes are placed, what they preserve (shapes, references, kernel state), and which
edits are refused because their gradients are not known. `reader_versions` decides which version of
a value each reader gets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.gradients.graphs.gradient_versions import GradientVersions
from amanda_driver_tf.graphs.analysis import OpPlans, is_operator
from amanda_driver_tf.graphs.body import Node, Value, is_ref
from amanda_driver_tf.graphs.control_flow_contexts import is_differentiated_elsewhere
from amanda_driver_tf.graphs.records import is_of_jacobian, is_symbolic
from amanda_driver_tf.insertion.body_edits import BodyEdits
from amanda_driver_tf.insertion.nodes import Flat, New
from amanda_driver_tf.insertion.observers import Observers
from amanda_driver_tf.insertion.op_values import Differentiated, Key, key_of
from amanda_driver_tf.insertion.step_functions import Layout, fold, keep_shapes, refuse_changes
from amanda_driver_tf.insertion.step_groups import (
    grouped_steps,
    references_of,
    selected_indices,
    selected_layout,
)
from amanda_driver_tf.operators.signature import signature_of
from amanda_driver_tf.tensorflow_internals.objects import operation_number

__all__ = ["DIFFERENTIATED_ELSEWHERE", "NEW_CONTROL_FLOW", "Insertions"]

_IMPORT_FIRST = (
    "Import amanda before the graph is built, trace the function again, and compute Jacobians "
    "outside of functions or with experimental_use_pfor=False"
)


_CANNOT_FOLLOW = (
    "The gradient of an edited value cannot follow the edit, since it was built before Amanda was "
    "imported, by pfor, or by a tf.autodiff.ForwardAccumulator"
)
_INSIDE = (
    "The gradient of an edited op is computed in a loop, branch or function that is inside the "
    "graph of the op"
)
_BESIDE = "Compute the gradient in the same graph as the op"
_SECOND_STATE = (
    "The input of an op was edited whose kernel keeps a state (a resource, or a position in a "
    "sequence of random numbers). The edited op would have a second state"
)
#: Why values that a gradient reads of an op in a TensorFlow 1 loop or branch cannot be edited.
DIFFERENTIATED_ELSEWHERE = (
    "The gradient of an edited op is computed in a loop or branch of TensorFlow 1 that does not "
    "contain the op"
)
NEW_CONTROL_FLOW = (
    "Build the graph with tf.compat.v1.enable_control_flow_v2(), or edit the gradient instead"
)
_NOT_RECORDED = (
    "they were built before Amanda was imported, read from a file, or made by pfor or a "
    "tf.autodiff.ForwardAccumulator"
)
_FOLLOWED = "a tf.autodiff.ForwardAccumulator computes tangents there, and no gradients"
_EDIT_OUTPUT = "Edit its output, or replace it"


class _Selected(NamedTuple):
    """The values at a point that a group of steps gets.

    Attributes:
        indices: Their indices among all values there.
        values: The values.
        layout: The layout of the positions of all values, in which only these are present.
        frozen: Which of them cannot be changed, since they are references.
    """

    indices: list[int]
    values: list[Value]
    layout: Layout
    frozen: list[bool]

    @property
    def dtypes(self) -> list[int]:
        """The DataTypes of the values."""
        return [value.dtype for value in self.values]

    @property
    def given(self) -> tuple[list[Value], list[int]]:
        """The inputs of a new node, and the DataTypes of its outputs."""
        return self.values, self.dtypes

    @property
    def is_frozen(self) -> bool:
        """True if there are values, and none can be changed."""
        return bool(self.values) and all(self.frozen)

    def replace(self, values: list[Value], made: Sequence[Value]) -> None:
        """Put new values in the place of those that can be changed."""
        for index, frozen, new in zip(self.indices, self.frozen, made, strict=True):
            if not frozen:
                values[index] = new


class Insertions:
    """Inserts the planned steps at the ops of one body.

    Args:
        edits: The edits of the body.
        observers: Its observers.
        gradients: Its gradients.
    """

    def __init__(self, edits: BodyEdits, observers: Observers, gradients: GradientVersions) -> None:
        self._edits, self._observers, self._gradients = edits, observers, gradients

    def steps(
        self,
        name: str,
        steps: Sequence[Step],
        values: list[Value],
        layout: Layout,
        node: Node,
        differentiated: list[Differentiated] | None = None,
        after: bool = False,
    ) -> list[Value]:
        """Insert steps at a point and return the new values.

        Neighbouring host routines share a node.

        Args:
            name: The wished name of the nodes.
            steps: The steps.
            values: The values at the point.
            layout: Layout of their positions.
            node: The op.
            differentiated: Collects the steps that are differentiated as written; None if none can
                be.
            after: Whether the point is after the op rather than before.
        """
        values = list(values)
        observers: list[New] = []
        for group in grouped_steps(steps):
            first = group[0]
            selected = self._selected(group, values, layout, node, after)
            if self._observers.include(first):
                observers = [self._observe(name, group, selected, node, observers, after)]
                continue
            flat = fold(group, selected.layout, selected.dtypes, selected.frozen)
            if self._edits.is_differentiated:
                flat = self._keep_shapes(flat, first, node, selected.indices, after)
            if not after and self._edits.keeps_state(node):
                # The op must keep its inputs, so the routine runs beside it.
                flat = refuse_changes(flat, first, _SECOND_STATE, _EDIT_OUTPUT)
                self._edits.insert(name, flat, *selected.given, first, node, after=True)
                continue
            if differentiated is not None:
                reason = self._why_not_followed(node)
                flat = flat if reason is None else refuse_changes(flat, first, *reason)
                if first.action.autodiff:
                    differentiated.append(
                        Differentiated(flat, selected.values, selected.indices, first)
                    )
            made = self._edits.insert(name, flat, *selected.given, first, node, after)
            if made:
                made[0].node.controls += observers
            selected.replace(values, made)
            if selected.is_frozen:
                # Readers keep the references, so nobody reads the new node.
                if after:
                    self._edits.kept.add(made[0].node)
                else:
                    node.controls.append(made[0].node)
        return values

    def _selected(
        self, group: Sequence[Step], values: list[Value], layout: Layout, node: Node, after: bool
    ) -> _Selected:
        """Return the values at a point that a group of steps gets."""
        indices = selected_indices(group, layout, len(values), all_of_them=after)
        if not after and node.op.op_def.allows_uninitialized_input:
            # The variable may not be initialized yet.
            indices = [index for index in indices if not is_ref(values[index].dtype)]
        references = references_of(node)
        return _Selected(
            indices,
            [values[index] for index in indices],
            selected_layout(layout, indices),
            [is_ref(values[index].dtype) and (after or index in references) for index in indices],
        )

    def _why_not_followed(self, node: Node) -> tuple[str, str] | None:
        """Return why an op's gradient cannot follow edits of its values, and a way out; None if it
        can.
        """
        named = node.op.name in self._edits.named and self._edits.is_in_frame(node)
        if self._edits.unpaired or self._edits.followed or named:
            return _CANNOT_FOLLOW, _IMPORT_FIRST
        if operation_number(node.op) in self._edits.around.differentiated_inside:
            return _INSIDE, _BESIDE
        if self._is_differentiated_elsewhere(node):
            return DIFFERENTIATED_ELSEWHERE, NEW_CONTROL_FLOW
        return None

    def _observe(
        self,
        name: str,
        steps: Sequence[Step],
        selected: _Selected,
        node: Node,
        earlier: list[New],
        after: bool,
    ) -> New:
        """Insert observers of an op's inputs or outputs as one node.

        Args:
            name: The wished name of the node.
            steps: The steps.
            selected: The values they observe.
            node: The op.
            earlier: Observers at this point that run first.
            after: Whether they are after the op rather than before.
        """
        made = self._observers.insert(name, steps, selected.layout, selected.values)
        made.controls += earlier
        self._edits.beside[id(made)] = node
        if not after:
            # A routine before an op must not run until the op's control inputs have.
            made.controls += node.controls
            if self._edits.keeps_state(node):
                self._edits.kept.add_after(made, node)  # Beside the unchanged node.
            elif self._edits.is_dropped(node):
                self._edits.kept.add_before(made, node)
            else:
                node.controls.append(made)
                self._edits.kept.add_after(made, node)
            return made
        if not selected.values:
            made.controls.append(node.name)
        if node.op.op_def.is_stateful:
            self._edits.kept.add(made)
        else:
            self._edits.kept.add_after(made, node)
        self._observers.note_after(node, [made])
        return made

    def _keep_shapes(
        self, flat: Flat, step: Step, node: Node, selected: Sequence[int], after: bool
    ) -> Flat:
        """Wrap a fold so that it keeps the shapes of some inputs or outputs of a node."""
        # The shapes of the graph's own tensors, since new nodes have none.
        tensors = list(node.op.outputs if after else node.op.inputs)
        passed: Collection[int] = ()
        if not step.action.autodiff:
            owner = self._edits.owner(node.op)
            known = node.op.name not in self._edits.named and not (
                owner is not None and owner.is_named
            )
            passed = self._gradients.passed_on(node.op, after) if known else range(len(tensors))
        straight = [place for place, index in enumerate(selected) if index in passed]
        return keep_shapes(flat, [tensors[index].shape for index in selected], step, straight)

    def refuse_unread(self, node: Node, plans: OpPlans) -> None:
        """Refuse steps that need more of a gradient than the names of its ops tell, and a
        replacement that nobody would read.
        """
        steps = [*plans.before.steps, *plans.after.steps]
        derived = [step for step in steps if step.action.autodiff]
        replacement = plans.before.replacement
        if replacement is not None:
            derived.append(replacement)
            if not node.dtypes:
                raise UnsupportedError(
                    "In a graph, an operator that returns nothing is run for its effect, and no "
                    "replacement can take its place",
                    where=replacement.where,
                    fix="Run the function eagerly, or edit the operator's inputs",
                )
        if derived and self._is_differentiated_elsewhere(node):
            raise UnsupportedError(
                DIFFERENTIATED_ELSEWHERE, where=derived[0].where, fix=NEW_CONTROL_FLOW
            )
        needing = [
            *derived,
            plans.aligned_before.replacement,
            *plans.aligned_before.steps,
            *plans.aligned_after.steps,
        ]
        found = [step for step in needing if step is not None]
        if not found:
            return
        step = next((step for step in found if not step.action.observe), None)
        unknown = node.op.name in self._edits.named or self._edits.unpaired
        followed = self._edits.followed and not unknown
        if step is None or (followed and not derived and not self._has_gradient(node)):
            if followed or unknown:
                why = _FOLLOWED if followed else _NOT_RECORDED
                self._edits.unmet_requests[f"gradients of {node.name!r}"] = why
            return
        if operation_number(node.op) in self._edits.around.differentiated_inside:
            raise UnsupportedError(_INSIDE, where=step.where, fix=_BESIDE)
        if self._edits.owner(node.op) is None and is_of_jacobian(node.op):
            return  # It chooses a row, or counts them; the program has no such op.
        if followed or unknown:
            raise UnsupportedError(
                f"The gradients of this op are not known: {_NOT_RECORDED}",
                where=step.where,
                fix=_IMPORT_FIRST,
            )

    def _has_gradient(self, node: Node) -> bool:
        """Return True if a gradient of an op was built in this body."""
        return self._edits.records is not None and bool(self._edits.records.of_op(node.op))

    def _is_differentiated_elsewhere(self, node: Node) -> bool:
        records = self._edits.records
        return records is not None and any(map(is_differentiated_elsewhere, records.of_op(node.op)))

    def shapes_wanted(self, node: Node) -> list[Any]:
        """Return the shapes that the outputs of a replacement must have; None for any."""
        if not self._edits.is_differentiated:
            return []
        return [
            None if self._may_change_shape(tensor) else tensor.shape for tensor in node.op.outputs
        ]

    def _may_change_shape(self, tensor: Any) -> bool:
        """Return True if all readers of a tensor are replaced, so that its shape may change.

        If a tensor is returned or differentiated, its gradient was built elsewhere for its shape.
        """
        if key_of(tensor) in self._returned_or_differentiated() or not self._is_replaced(tensor.op):
            return False
        readers = [
            op if owner is None else owner.forward
            for op in tensor.consumers()
            for owner in [self._edits.owner(op)]
            if owner is None or owner.forward is not tensor.op
        ]
        return bool(readers) and all(map(self._is_replaced, readers))

    def _is_replaced(self, op: Any) -> bool:
        """Return True if an op is replaced, and its gradient is that of the replacement."""
        if self._edits.body.node_of(op) is None or not is_operator(op.type):
            return False
        plans = self._edits.analysis.plans_of(op)
        return (
            plans is not None
            and plans.before.replacement is not None
            and plans.aligned_before.replacement is None
        )

    def _returned_or_differentiated(self) -> set[Key]:
        """Return the tensors that are returned to the caller, or differentiated in this body."""
        runs = self._edits.records.runs if self._edits.records is not None else []
        differentiated = {key_of(y) for run in runs for y in run.targets if is_symbolic(y)}
        # The user's results come first, then the values saved for gradients.
        structure = getattr(self._edits.body.graph, "structured_outputs", None)
        returned = [(id(value.node.op), value.slot) for value in self._edits.body.results.values()]
        if structure is not None:
            outputs = tf.nest.flatten(structure, expand_composites=True)
            returned = returned[: sum(output is not None for output in outputs)]
        return differentiated | set(returned)

    def layout_of(self, node: Node) -> Layout:
        """Return how a node's inputs and outputs are grouped into positions."""
        signature = signature_of(node.op_type)
        if signature is None:
            return Layout([None] * len(node.inputs))
        return Layout(signature.lengths(node.op.get_attr))
