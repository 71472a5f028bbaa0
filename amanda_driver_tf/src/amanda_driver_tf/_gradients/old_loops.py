"""`OldLoops`: loops and branches of TensorFlow 1, which are frames and switches in one graph.

Owns how a value of the forward program gets to a gradient that stands in another frame or branch
of the same graph, what a gradient's op reads there, and what keeps new nodes in their frame.

TensorFlow leads a value into a gradient's loop by a stack that the loop pushes to and its gradient
pops from, or as an invariant that enters both. A value that it did not lead there gets a stack of
its own, ordered by the counters of the two loops in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensorflow.core.framework import types_pb2

from amanda_core.errors import UnsupportedError
from amanda_driver_tf._gradients.op_versions import OpVersions
from amanda_driver_tf._graphs.body import Node, Value
from amanda_driver_tf._graphs.frames import ENTERS
from amanda_driver_tf._graphs.records import Record, components
from amanda_driver_tf._insertion.body_edits import BodyEdits
from amanda_driver_tf._insertion.definitions import attr_bool, attr_int, attr_text, attr_type
from amanda_driver_tf._insertion.list_nodes import any_size
from amanda_driver_tf._insertion.nodes import Host, Inlined, New, Plain
from amanda_driver_tf._tensorflow_internals.modules import control_flow_util
from amanda_driver_tf._tensorflow_internals.objects import control_flow_context

__all__ = ["OldLoops"]

_SWITCHES = ("Switch", "RefSwitch")
_PUSH, _POP = "StackPushV2", "StackPopV2"


class OldLoops:
    """The old loops and branches of one body.

    Args:
        edits: The edits of the body.
        versions: Which versions its ops saw.
    """

    def __init__(self, edits: BodyEdits, versions: OpVersions) -> None:
        self._edits, self._body, self._versions = edits, edits.body, versions
        # Functions have new ones.
        nodes = edits.body.nodes if edits.body.fdef is None else ()
        has_frames = edits.frames is not None
        self._exist = has_frames or any(node.op_type in _SWITCHES for node in nodes)
        self._by_name = {node.name: node for node in nodes} if self._exist else {}
        #: Push -> what it pushes, ahead of what tools insert at it.
        self._pushed: dict[int, Value] = {}
        self._pushes: dict[int, Node] = {}
        for node in nodes if has_frames else ():
            if node.op_type == _PUSH:
                self._pushes[id(_stack_of(node.op))] = node
        self._led: dict[int, dict[tuple[int, int], Any]] = {}
        self._brought: dict[tuple[Value, int], Value] = {}
        self._entered: dict[tuple[Value, int], Value] = {}

    def note(self, node: Node, inputs: Sequence[Value]) -> None:
        """Note what a node reads."""
        if node.op_type == _PUSH:
            self._pushed[id(node.op)] = inputs[1]

    # What gradients read.

    def read(self, value: Value, owner: Record) -> Value | None:
        """Return what a gradient's op reads for a value that was led to it; None for any other."""
        if not self._exist or value.node.is_argument:
            return None
        for tensor, carried in self._levels(value):
            wanted = self._versions.version(tensor, owner)
            if wanted is None:
                continue
            if carried is not None and self._origin(carried) == self._origin(wanted):
                return self._edits.visible(value)
            place = control_flow_util.GetOutputContext(value.node.op)
            return self._bring(wanted, owner, place)
        return None

    def bring(self, value: Value, owner: Record) -> Value:
        """Return what an op of the forward program saw as a value for its gradient."""
        return self._bring(value, owner, _place_of(owner)) if self._exist else value

    def _levels(self, value: Value) -> Iterator[tuple[Any, Value | None]]:
        """Tensors that a value was led from, nearest first, with what arrives of each."""
        op, slot = value.node.op, value.slot
        arrives = True
        while True:
            tensor = self._history(op, slot)
            if tensor is not None:
                yield tensor, self._popped(op, tensor) if arrives else None
            if not _is_way_in(op):
                return
            node = self._body.node_of(op)
            source = self._body.value_of(op.inputs[0])
            if node is None or source is None:
                return
            yield op.inputs[0], node.inputs[0] if arrives else None
            arrives = arrives and node.inputs[0] == source
            op, slot = source.node.op, source.slot

    def _history(self, op: Any, slot: int) -> Any:
        """The tensor of a loop that a tensor of its gradient stands for, or None."""
        flow = control_flow_context(op)
        flow = flow.GetWhileContext() if flow is not None else None
        state = flow.grad_state if flow is not None else None
        if state is None:
            return None
        led = self._led.get(id(state))
        if led is None:
            led = self._led[id(state)] = {
                (id(real.op), real.value_index): name for name, real in state.history_map.items()
            }
        name, _, index = led.get((id(op), slot), "").rpartition(":")
        node = self._by_name.get(name)
        return node.op.outputs[int(index)] if node is not None else None

    def _popped(self, op: Any, tensor: Any) -> Value | None:
        """Return what arrives where a tensor of a loop was led to."""
        if _is_way_in(op):
            node = self._body.node_of(op)
            return node.inputs[0] if node is not None else None
        if op.type != _POP:
            value = self._body.value_of(tensor)
            return self._edits.visible(value) if value is not None else None
        push = self._pushes.get(id(_stack_of(op)))
        if push is None:
            return None
        self._edits.visit(push)
        return self._pushed.get(id(push.op))

    def _origin(self, value: Value) -> Value:
        """Return what a value was led in from, if it is as it was there."""
        value = self._edits.plain(value)
        while (
            isinstance(value.node, Node)
            and _is_way_in(value.node.op)
            and self._edits.visible(value) == value
        ):
            value = self._edits.plain(value.node.inputs[0])
        return value

    # Ways for values.

    def _bring(self, value: Value, owner: Record, place: Any) -> Value:
        source = control_flow_context(owner.forward)
        if place is source:
            return value
        known = self._brought.get((value, id(place)))
        if known is None:
            known = self._brought[value, id(place)] = self._way(value, owner, source, place)
        return known

    def _way(self, value: Value, owner: Record, source: Any, place: Any) -> Value:
        loop, gradient = _loop_of(source), _loop_of(place)
        home = _common(source, place)
        if loop is gradient or _is_around(loop, gradient):
            return self._enter(value, place, home)
        state = gradient.grad_state if gradient is not None else None
        if state is None or state.forward_context is not loop:
            raise UnsupportedError(
                "The gradient of an edited op is computed in another loop than the gradient of the "
                "loop that the op is in",
                where=f"{owner.forward.type} {owner.forward.name!r}",
                fix="Compute the gradient beside the loop",
            )
        return self._stacked(value, owner, source, gradient, home)

    def _enter(self, value: Value, place: Any, home: Any) -> Value:
        """A value of a context in a context inside it."""
        if place is home:
            return value
        known = self._entered.get((value, id(place)))
        if known is None:
            outer = self._enter(value, place.outer_context, home)
            if place.IsWhileContext():
                known = self._frame_entered(outer, place)
            else:
                known = self._switched(outer, place.branch, self._now(place.pred))
            self._entered[value, id(place)] = known
        return known

    def _frame_entered(self, value: Value, loop: Any) -> Value:
        attrs = {"T": attr_type(value.base), "frame_name": attr_text(loop.name)}
        attrs["is_constant"] = attr_bool(True)
        attrs["parallel_iterations"] = attr_int(loop.parallel_iterations)
        return self._add("enter", "Enter", [value], [value.base], attrs)

    def _switched(self, value: Value, branch: int, predicate: Value) -> Value:
        dtype = value.base
        attrs = {"T": attr_type(dtype)}
        made = self._add("switch", "Switch", [value, predicate], [dtype, dtype], attrs)
        return Value(made.node, int(branch))

    def _stacked(self, value: Value, owner: Record, source: Any, gradient: Any, home: Any) -> Value:
        """A value of a loop, of any branch of it, in the loop that computes the gradient."""
        state, dtype = gradient.grad_state, value.base
        loop = state.forward_context
        handle = self._stack(dtype, home)
        attrs = {"T": attr_type(dtype), "swap_memory": attr_bool(loop.swap_memory)}
        handles = self._enter(handle, loop, home)
        push = self._add("push", _PUSH, [handles, value], [dtype], attrs)
        # Behind the counter of this turn, and ahead of the next turn.
        push.node.controls.append(state.forward_index.op.inputs[0].op.name)
        self._before_next(push.node, state.forward_index.op)
        handles = self._enter(handle, gradient, home)
        branch = _branch_of(source, loop)
        if branch is not None:
            # As the branch may not have run, and pushed nothing.
            taken = state.history_map.get(branch.pred.name)
            if taken is None:
                raise UnsupportedError(
                    "The gradient of an edited op does not know which branch was taken",
                    where=f"{owner.forward.type} {owner.forward.name!r}",
                    fix="Leave the ops of this branch as they are",
                )
            handles = self._switched(handles, branch.branch, self._now(taken))
        pop = self._add("pop", _POP, [handles], [dtype], {"elem_type": attr_type(dtype)})
        if branch is None:
            pop.node.controls.append(gradient.GetControlPivot().op.name)
        self._before_next(pop.node, state.grad_index.op)
        return pop

    def _stack(self, dtype: int, home: Any) -> Value:
        limit = any_size("version/limit")
        self._edits.add(limit)
        if home is not None:
            limit.controls.append(home.GetControlPivot().op.name)
        attrs = {"elem_type": attr_type(dtype), "stack_name": attr_text("")}
        return self._add("stack", "StackV2", [Value(limit, 0)], [types_pb2.DT_RESOURCE], attrs)

    def _before_next(self, made: New, counter: Any) -> None:
        """Make the next iteration of a counter wait for a node, be it dead or alive."""
        trigger = Plain("version/sync", "ControlTrigger", [], [], {}, [])
        trigger.controls.append(made)
        self._edits.add(trigger)
        node = self._body.node_of(counter)
        assert node is not None
        node.controls.append(trigger)

    def _now(self, tensor: Any) -> Value:
        value = self._body.value_of(tensor)
        assert value is not None
        self._edits.visit(value.node)
        return self._edits.visible(value)

    def _add(
        self, name: str, op_type: str, inputs: list[Value], dtypes: list[int], attrs: dict[str, Any]
    ) -> Value:
        made = Plain(f"version/{name}", op_type, inputs, dtypes, attrs, [])
        self._edits.add(made)
        return Value(made, 0)

    # Frames.

    def settle(self) -> None:
        """Make all new nodes run in the frame that they stand in, as often as their ops."""
        frames, beside = self._edits.frames, self._edits.beside
        if frames is None:
            return
        settled: list[New] = []
        for made in self._edits.new:
            if isinstance(made, (Host, Inlined)) and frames.behind(made):
                if made.inputs and not made.controls and all(map(_is_invariant, made.inputs)):
                    # What enters a loop once is there in each turn, also in the one that ends it.
                    settled += self._wait(made, beside.get(id(made)))
                if isinstance(made, Inlined):
                    # Without it, constants inside would stand outside of all frames.
                    made.anchor = _anchor(made)
                    made.controls.append(made.anchor)
                    settled.append(made.anchor)
            settled.append(made)
        self._edits.new[:] = settled

    def _wait(self, made: New, node: Node | None) -> list[New]:
        """Make a node that reads nothing but invariants run when its op does."""
        if node is None:
            # At a gradient, of which the records say where it is computed.
            flow = control_flow_context(made.inputs[0].node.op)
            made.controls.append(flow.GetControlPivot().op.name)
            return []
        for tensor in node.op.inputs:
            value = self._body.value_of(tensor)
            if value is not None and not _is_invariant(value):
                # Not what the node reads now: that may be another one that is to wait.
                identity = _identity("turn", self._edits.visible(value))
                made.controls.append(identity)
                return [identity]
        return []


def _anchor(made: Inlined) -> Plain:
    """A node in the frame of a call, alive when it is."""
    if not made.inputs:
        anchor = Plain("frame", "NoOp", [], [], {}, [])
        anchor.controls += made.controls
        return anchor
    return _identity("frame", made.inputs[0])


def _identity(name: str, value: Value) -> Plain:
    return Plain(name, "Identity", [value], [value.base], {"T": attr_type(value.base)}, [])


def _is_invariant(value: Value) -> bool:
    return (
        isinstance(value.node, Node)
        and value.node.op_type in ENTERS
        and bool(value.node.op.node_def.attr["is_constant"].b)
    )


def _is_way_in(op: Any) -> bool:
    """Return True if an op leads a value of a context into one inside it."""
    if op.type in ENTERS:
        return bool(op.node_def.attr["is_constant"].b)
    return op.type in _SWITCHES and not control_flow_util.IsLoopSwitch(op)


def _stack_of(op: Any) -> Any:
    """The stack that an op pushes to or pops from."""
    while op.type != "StackV2" and op.inputs:
        op = op.inputs[0].op
    return op


def _place_of(owner: Record) -> Any:
    """The context that an op's gradient is computed in."""
    loop = _loop_of(control_flow_context(owner.forward))
    found = [
        control_flow_util.GetOutputContext(tensor.op)
        for gradient in (*owner.in_grads, *owner.out_grads)
        for tensor in components(gradient)
    ]
    for place in found:
        gradient = _loop_of(place)
        state = gradient.grad_state if gradient is not None else None
        if state is not None and state.forward_context is loop:
            return gradient
    return found[0] if found else control_flow_context(owner.forward)


def _loop_of(place: Any) -> Any:
    return place.GetWhileContext() if place is not None else None


def _is_around(loop: Any, inner: Any) -> bool:
    """Return True if a loop, or None for what is in no loop, is around another one."""
    while inner is not None:
        inner = _loop_of(inner.outer_context)
        if inner is loop:
            return True
    return False


def _around(place: Any) -> list[Any]:
    found = [place]
    while place is not None:
        place = place.outer_context
        found.append(place)
    return found


def _common(one: Any, other: Any) -> Any:
    """The innermost context that is around both."""
    return next(place for place in _around(one) if place in _around(other))


def _branch_of(place: Any, loop: Any) -> Any:
    """The innermost branch that a place in a loop is in; None where it is in none of the loop."""
    return place if place is not loop and place.IsCondContext() else None
