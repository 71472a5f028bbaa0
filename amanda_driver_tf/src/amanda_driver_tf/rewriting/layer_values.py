"""`LayerValues`: what layers take and return in a body, as versions of the tensors that carry it.

A layer's values are not ops of the graph. What it takes is read by the ops that it makes, and by
nobody else; what it returns is read by the ops that are made after it has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import MODULE_INPUT, MODULE_OUTPUT, Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.analysis import OpPlans
from amanda_driver_tf.graphs.body import Node, Value
from amanda_driver_tf.graphs.layer_calls import LayerCall, calls_in
from amanda_driver_tf.insertion.body_edits import BodyEdits
from amanda_driver_tf.insertion.observers import Observers
from amanda_driver_tf.insertion.op_values import Key, key_of
from amanda_driver_tf.insertion.step_functions import Layout
from amanda_driver_tf.rewriting.insertions import Insertions
from amanda_driver_tf.tensorflow_internals.objects import operation_number

__all__ = ["LayerValues"]


class LayerValues:
    """The values of layers in one body.

    Args:
        edits: The edits of the body.
        observers: Its observers.
        insertions: Inserts steps.
    """

    def __init__(self, edits: BodyEdits, observers: Observers, insertions: Insertions) -> None:
        self._edits, self._observers, self._insertions = edits, observers, insertions
        #: Tensor -> its calls and returns: number, whether a layer is called, and the call.
        self._events: dict[Key, list[tuple[int, bool, LayerCall]]] = {}
        #: The places of what was inserted, by whose identity the body knows that they run.
        self._places: list[Node] = []
        for call in calls_in(edits.body.graph) if edits.body.fdef is not None else ():
            given, returned = call.given, call.returned
            takes = self._plans(call, MODULE_INPUT) is not None
            if takes:
                self._add(given, (call.entered, True, call))
                self._add(given, (call.left, False, call))
            if self._plans(call, MODULE_OUTPUT) is not None and not (takes and given is returned):
                self._add(returned, (call.left, False, call))

    def _plans(self, call: LayerCall, op_type: str) -> OpPlans | None:
        op = call.values.get(op_type)
        plans = self._edits.analysis.plans_of(op) if op is not None else None
        return plans if plans is not None and any(plans[1:]) else None

    def _add(self, tensor: Any, event: tuple[int, bool, LayerCall]) -> None:
        self._events.setdefault(key_of(tensor), []).append(event)

    def insert(self, node: Node) -> None:
        """Insert the plans of the layers that take or return an output of a node."""
        if not self._events:
            return
        for slot, tensor in enumerate(node.op.outputs[: len(node.dtypes)]):
            if events := self._events.get(key_of(tensor)):
                self._versions(Value(node, slot), tensor, sorted(events, key=lambda one: one[0]))

    def _versions(
        self, value: Value, tensor: Any, events: Sequence[tuple[int, bool, LayerCall]]
    ) -> None:
        current = self._edits.visible(value)
        versions = [(0, current)]
        around: list[Value] = []
        for _, enters, call in events:
            if enters:
                around.append(current)
                current = self._inserted(call, MODULE_INPUT, value, current)
                versions.append((call.start, current))
                continue
            inside = current
            if call.given is tensor and self._plans(call, MODULE_INPUT) is not None:
                current = around.pop()
            if call.returned is tensor:
                current = self._inserted(call, MODULE_OUTPUT, value, inside)
            versions.append((call.stop, current))
        self._edits.show_versions(value, versions)

    def _inserted(self, call: LayerCall, op_type: str, value: Value, current: Value) -> Value:
        """Insert the plans at a layer's value, and return its new version."""
        plans = self._plans(call, op_type)
        if plans is None:
            return current
        steps = [*plans.before.steps, *plans.after.steps]
        self._refuse(call, op_type, plans, steps)
        if not steps:
            return current
        # It stands where the op does that makes the tensor.
        place = Node(value.node.name, op_type, call.values[op_type], [value.dtype])
        if id(value.node) in self._edits.body.running:
            self._edits.body.running.add(id(place))
        self._places.append(place)
        count = len(self._edits.new)
        name = f"{op_type}_{value.node.name}"
        (new,) = self._insertions.steps(name, steps, [current], Layout([None]), place, after=True)
        self._observers.note_after(
            value.node, [made for made in self._edits.new[count:] if not made.dtypes]
        )
        return new

    def _refuse(self, call: LayerCall, op_type: str, plans: OpPlans, steps: Sequence[Step]) -> None:
        """Refuse what cannot be done at the value of a layer in a graph.

        Raises:
            UnsupportedError: The value is replaced or differentiated, its gradient is edited, or
                its readers cannot be told from those of the same tensor in another place.
        """
        derived = [step for step in steps if step.action.autodiff]
        gradients = [
            *plans.aligned_before.steps,
            *plans.aligned_after.steps,
            plans.before.replacement,
            plans.aligned_before.replacement,
        ]
        for step in (*derived, *gradients):
            if step is not None:
                raise UnsupportedError(
                    "What a layer takes and returns in a graph can be observed and edited, but "
                    "neither replaced nor differentiated, and it has no gradient of its own",
                    where=step.where,
                    fix="Choose an operator of the layer, or run the function eagerly",
                )
        edit = next((step for step in steps if not step.action.observe), None)
        if edit is None or op_type not in call.shared:
            return
        (tensor,) = call.values[op_type].outputs
        first, last = (call.stop, None) if op_type == MODULE_OUTPUT else (call.start, call.stop)
        readers = sum(
            read is tensor
            for op in tensor.consumers()
            if first <= operation_number(op) < (last or operation_number(op) + 1)
            and self._edits.owner(op) is None
            for read in op.inputs
        )
        if readers > 1:
            word = "is given" if op_type == MODULE_INPUT else "returns"
            raise UnsupportedError(
                f"{call.path} {word} one tensor in two places. In the graph, it is not known which "
                "of them its readers mean",
                where=edit.where,
                fix="Edit an operator of the layer, or run the function eagerly",
            )
