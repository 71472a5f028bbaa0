"""`GradientVersions`: which version of a gradient each reader gets.

One tensor may be the gradient of several values: an addition passes its own gradient on to both
inputs. Gradients are therefore identified by the records (op, position) and not by tensors. Where
the records do not identify them either, the edit is refused, since a wrong gradient would go
unnoticed. The module is over 400 lines because its cases depend on one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.gradients.graphs.derivatives import Derivatives, ReadReturned
from amanda_driver_tf.gradients.graphs.op_versions import OpVersions
from amanda_driver_tf.gradients.graphs.unreachable_gradients import lost_inputs, refuse_unread
from amanda_driver_tf.graphs.analysis import OpPlans, is_container, is_operator
from amanda_driver_tf.graphs.body import Node, Value
from amanda_driver_tf.graphs.function_graphs import children_of
from amanda_driver_tf.graphs.records import Record, Records, Run, components, is_symbolic
from amanda_driver_tf.insertion.body_edits import BodyEdits
from amanda_driver_tf.insertion.nodes import New
from amanda_driver_tf.insertion.observers import Observers
from amanda_driver_tf.insertion.op_values import Differentiated, Key, OpValues, arguments_of, key_of
from amanda_driver_tf.tensorflow_internals.modules import custom_gradient, ops
from amanda_driver_tf.tensorflow_internals.names import ENDS_OF_RECOMPUTATION
from amanda_driver_tf.tensorflow_internals.objects import operation_number

__all__ = ["GradientVersions", "Reader"]


class Reader(NamedTuple):
    """An op of a gradient function and one of its inputs."""

    node: Node
    slot: int

    def turn(self, value: Value) -> int:
        """Return how many earlier inputs of the op are the same tensor."""
        return self.node.inputs[: self.slot].count(value)


class Read(NamedTuple):
    """Gradients as their readers see them, and the observers that these readers wait for."""

    gradients: list[list[Value] | None]
    observers: list[New]


class GradientVersions:
    """The gradients that are computed in one body.

    Args:
        edits: The edits of the body.
        observers: Its observers.
        versions: The versions that its ops ran on.
        derivatives: Inserts nodes that compute gradients instead of TensorFlow's ops.
        read: Returns the version of a value that a gradient function returns.
    """

    def __init__(
        self,
        edits: BodyEdits,
        observers: Observers,
        versions: OpVersions,
        derivatives: Derivatives,
        read: ReadReturned,
    ) -> None:
        self._edits, self._body, self._records = edits, edits.body, edits.records
        self._observers, self._versions, self._derivatives = observers, versions, derivatives
        self._read = read
        runs = edits.records.runs if edits.records is not None else ()
        #: Whether any gradient function computed gradients itself.
        self._is_nested = any(run.around for run in runs)
        #: Id of a captured tensor, such as a variable's handle -> key of its argument in this body.
        self._captured = arguments_of(edits.body.graph)
        #: Id of a captured tensor of another graph -> its argument in this body.
        self._arguments = {
            ops.tensor_id(outer): inner
            for outer, inner in getattr(edits.body.graph, "captures", ())
            if is_symbolic(outer)
        }
        self._out: dict[int, Read] = {}
        self._in: dict[int, Read] = {}
        #: Results of a differentiation -> the tensors that they are the whole gradient of.
        self._results: dict[Value, list[Key]] = {}
        #: The same, with the gradients that are passed to gradient functions.
        self._targets: dict[Value, list[Key]] = {}
        self._find_targets()

    def read(self, value: Value, reader: Node | None = None) -> Value | None:
        """Return the gradient that an ordinary reader gets; None if it reads a forward value.

        Args:
            value: The tensor.
            reader: The op that reads it; None if it is fetched or returned.
        """
        of = self._results.get(value)
        found = self._contributors(value, of) or self._last(self._contributors(value, None))
        found = [each for each in found if not self._is_forward(value, each[0], reader)]
        return self._agreed(value, found)

    def _is_forward(self, value: Value, owner: Record, reader: Node | None) -> bool:
        """Return True if `reader` uses this tensor as a forward value rather than as a gradient.

        A gradient function may return a tensor of the forward program. Custom gradients do so, and
        so does one that passes on the `output_gradients` of a differentiation. Ops made before the
        differentiation read the forward value; ops made after one that returned the tensor read the
        gradient.
        """
        begun = owner.run.start if owner.run is not None else owner.start
        if owner.is_named or operation_number(value.node.op) >= begun:
            return False
        return value not in self._results or (
            reader is not None and operation_number(reader.op) < begun
        )

    def recomputed(self) -> list[tuple[Record, Step]]:
        """Return the gradients that new nodes compute instead of TensorFlow's ops, with the steps
        that cause it.
        """
        records = self._records.records if self._records is not None else ()
        return [(owner, step) for owner in records for step in self._recomputing_steps(owner)]

    def refuse_unread(self) -> None:
        """Refuse replacements of gradients where TensorFlow does not propagate the result."""
        if self._records is None:
            return
        for owner in (*self._records.unpropagated, *self._records.records):
            if self._is_elsewhere(owner):
                continue
            plans = self._plans_of(owner)
            if plans is not None and plans.aligned_before.replacement is not None:
                refuse_unread(owner, plans.aligned_before.replacement, self._body)

    def _recomputing_steps(self, owner: Record) -> list[Step]:
        if self._is_elsewhere(owner):
            return []
        plans, seen = self._plans_of(owner), self._seen_there(owner)
        steps: list[Step | None] = []
        if plans is not None:
            steps.append(plans.aligned_before.replacement)
            if id(owner) in self._versions.ambiguous:
                steps += [step for step in plans.before.steps if not step.action.observe]
        if seen is not None:
            inserted = (*seen.before, *seen.after, seen.replacement)
            steps += [each.step for each in inserted if each is not None]
        return [step for step in steps if step is not None]

    def _is_elsewhere(self, owner: Record) -> bool:
        """Return True if a gradient's op is in this graph, but not in this body."""
        forward = owner.forward
        return forward.graph is self._body.graph and self._body.node_of(forward) is None

    def in_function(self, value: Value, owner: Record, reader: Reader | None) -> Value | None:
        """Return the gradient that a gradient function reads or returns; None if it is not a
        gradient.

        It is one that the function was passed, or one that it computed itself.

        Args:
            value: The tensor.
            owner: The gradient.
            reader: The op of the function that reads the tensor; None if the function returns it.
        """
        given = self._given(value, owner, reader)
        if not self._is_nested:
            return given
        within = self._contributors_within(value, owner)
        if given is not None and reader is not None:
            # A gradient that was computed after the reader was made cannot be what it reads.
            within = [each for each in within if each[0].stop <= operation_number(reader.node.op)]
        if given is None or not within:
            return given or self._within(value, owner)
        # Both: an op that was differentiated inside the function passes on the gradient it gets.
        is_asked = False
        if reader is not None:
            node = reader.node
            is_asked = self.is_summed_within(node, owner) or self._is_unread(node)
            if _ends_recomputation(node):
                # Its inputs are the gradients that were computed, then those that were passed.
                asked = _count(value, (g for run in self._runs_of(owner) for g in run.results))
                is_asked = node.inputs.count(value) == asked + _count(value, owner.out_grads)
                if is_asked and reader.turn(value) >= asked:
                    return given
        asked_for = self._within(value, owner)
        if is_asked or asked_for == given:
            return asked_for
        raise _is_both(owner)

    def is_summed_within(self, node: Node, owner: Record) -> bool:
        """Return True if an op was made by a differentiation that a gradient function ran."""
        return any(
            run.start <= operation_number(node.op) < run.stop for run in self._runs_of(owner)
        )

    def _is_unread(self, node: Node) -> bool:
        if self._body.fdef is None:
            return False  # Any tensor of a session's graph may be fetched.
        returned = {value.node for value in self._body.results.values()}
        return node not in returned and not any(made.consumers() for made in node.op.outputs)

    def _runs_of(self, owner: Record) -> list[Run]:
        runs = self._records.runs if self._records is not None else []
        return [run for run in runs if run.is_asked_by(owner)]

    def _given(self, value: Value, owner: Record, reader: Reader | None) -> Value | None:
        """Return a gradient that a gradient function was passed, or None."""
        key = (id(value.node.op), value.slot)
        found = [
            (position, part)
            for position, gradient in enumerate(owner.out_grads)
            for part, tensor in enumerate(components(gradient))
            if key_of(self._here(tensor)) == key
        ]
        if not found:
            return None
        arrived = [(self.arriving(owner)[position], part) for position, part in found]
        versions = [
            parts[part] if parts is not None else self._edits.visible(value)
            for parts, part in arrived
        ]
        if all(version == versions[0] for version in versions):
            return versions[0]
        if (
            reader is not None
            and _in_order(owner.forward.type)
            and reader.node.inputs.count(value) == len(versions)
        ):
            return versions[reader.turn(value)]
        raise UnsupportedError(
            f"One tensor is the gradient of several outputs of {owner.forward.name!r}. They were "
            "edited differently, and it is not known which one its reader needs",
            fix="Edit the gradients of these outputs alike, or what the op makes of them",
        )

    def _here(self, tensor: Any) -> Any:
        """Return a gradient as a tensor of this body, since custom gradients may return captured
        tensors.
        """
        return self._arguments.get(ops.tensor_id(tensor), tensor)

    def _contributors_within(self, value: Value, owner: Record) -> list[tuple[Record, int]]:
        return [each for each in self._contributors(value, None) if each[0].is_within(owner)]

    def _within(self, value: Value, owner: Record) -> Value | None:
        """Return a gradient that the gradient function of `owner` computed itself, as its readers
        see it.
        """
        found = self._contributors_within(value, owner)
        of = self._results.get(value, ())
        asked = [each for each in found if self._key_of(*each) in of]
        return self._agreed(value, asked or self._last(found))

    def passed_on(self, op: Any, after: bool) -> set[int]:
        """Return the indices of inputs (or outputs) that have a gradient, or are one.

        Gradients in functions of gradients count, too.

        Args:
            op: The op.
            after: Whether to look at its outputs rather than its inputs.
        """
        tensors = op.outputs if after else op.inputs
        found = {index for index, tensor in enumerate(tensors) if self._is_dense(tensor, op)}
        beside = [Records.of(child) for child in children_of(self._body.graph)]
        for noted in (self._records, *beside):
            for owner in noted.of_op(op) if noted is not None else ():
                for position, gradient in enumerate(owner.out_grads if after else owner.in_grads):
                    # The shape of slices may change.
                    if len(parts := components(gradient)) != 1:
                        continue
                    # It is not known which gradients of another body are needed.
                    if noted is not self._records or self._body.value_of(parts[0]):
                        found.add(position)
                if after:
                    found -= owner.missing
        return found

    def _is_dense(self, tensor: Any, reader: Any) -> bool:
        """Return True if a tensor that an op reads or makes is a dense gradient."""
        if self._records is None:
            return False
        contributions = self._records.contributions().get(key_of(tensor), ())
        gradients = [owner.in_grads[position] for owner, position in contributions]
        owner = self._records.owner(reader)
        gradients += owner.out_grads if owner is not None else ()
        return any(
            len(parts := components(gradient)) == 1 and parts[0] is tensor for gradient in gradients
        )

    def _find_targets(self) -> None:
        """Find the tensors that each result is the whole gradient of."""
        if self._records is None:
            return
        for run in self._records.runs:
            for gradient, source in zip(run.results, run.sources, strict=False):
                self._note(self._results, gradient, source)
                self._note(self._targets, gradient, source)
        for found in self._records.records:
            for gradient, output in zip(found.out_grads, found.outputs, strict=False):
                self._note(self._targets, gradient, output)

    def _note(self, targets: dict[Value, list[Key]], gradient: Any, of: Any) -> None:
        key = self._key(of)
        for tensor in components(gradient):
            value = self._body.value_of(tensor)
            if value is not None and key is not None:
                targets.setdefault(value, []).append(key)

    def _key(self, tensor: Any) -> Key | None:
        """Return the key of a tensor of the forward program; None for anything else."""
        if isinstance(tensor, ops.EagerTensor):
            return self._captured.get(ops.tensor_id(tensor))
        return key_of(tensor) if hasattr(tensor, "value_index") else None

    def accumulated(self, node: Node) -> list[Value]:
        """Return the inputs of an op that sums the contributions to one gradient."""
        of = self._targets.get(Value(node, 0))
        result = []
        turns: dict[Value, int] = {}
        for value in node.inputs:
            found = self._contributors(value, of)
            turn = turns[value] = turns.get(value, -1) + 1
            if len(found) == node.inputs.count(value):
                # One tensor is several of the contributions, which are in the order of the ops.
                found = [found[turn]]
            gradient = self._agreed(value, found)
            result.append(gradient if gradient is not None else self._edits.visible(value))
        return result

    def _contributors(self, value: Value, of: list[Key] | None) -> list[tuple[Record, int]]:
        """Return the gradients that a tensor stands for: those of `of`, or all if `of` is None."""
        if self._records is None or value.node.is_argument:
            return []
        found = self._records.contributions().get((id(value.node.op), value.slot), [])
        return [each for each in found if of is None or self._key_of(*each) in of]

    def _key_of(self, owner: Record, position: int) -> Key | None:
        if position >= len(owner.inputs):
            return None
        return self._key(owner.inputs[position])

    def _last(self, found: list[tuple[Record, int]]) -> list[tuple[Record, int]]:
        """Return the gradients without those that were passed on to another of them."""
        passed = {self._key(output) for owner, _ in found for output in owner.outputs}
        return [each for each in found if self._key_of(*each) not in passed] or found

    def _agreed(self, value: Value, found: list[tuple[Record, int]]) -> Value | None:
        """Return the version of a tensor on which all of these gradients agree; None if there are
        none.

        Raises:
            UnsupportedError: They were edited differently.
        """
        versions = {self._contribution(*each, value) for each in found}
        if len(versions) > 1:
            names = sorted({owner.forward.name for owner, _ in found})
            raise UnsupportedError(
                f"One tensor is the gradient of several inputs, of {', '.join(names)}. They were "
                "edited differently, and it is not known which one its reader needs",
                fix="Edit the gradient at the outputs instead, or at all of these inputs alike",
            )
        return versions.pop() if versions else None

    def _contribution(self, owner: Record, position: int, value: Value) -> Value:
        new = self._contributions(owner)[position]
        parts = components(owner.in_grads[position])
        index = next(i for i, t in enumerate(parts) if key_of(t) == (id(value.node.op), value.slot))
        return new[index] if new is not None else self._edits.visible(value)

    def arriving(self, owner: Record) -> list[list[Value] | None]:
        """Return the gradients passed to an op's gradient function, with the edits at its outputs
        applied.
        """
        known = self._out.get(id(owner))
        if known is None:
            with self._observers.collecting() as before:
                arrived = self._arriving(owner)
            known = self._out[id(owner)] = self._at_arriving(owner, arrived, before)
        self._observers.collect(known.observers)
        return known.gradients

    def _arriving(self, owner: Record) -> list[list[Value] | None]:
        arrived: list[list[Value] | None] = []
        for position, gradient in enumerate(owner.out_grads):
            values = [self._body.value_of(self._here(tensor)) for tensor in components(gradient)]
            if not values or any(value is None for value in values):
                arrived.append(None)
                continue
            of = None
            if position < len(owner.outputs):
                of = [key] if (key := self._key(owner.outputs[position])) is not None else []
            parts = []
            for value in values:
                assert value is not None
                self._edits.visit(value.node)
                found = self._contributors(value, of)
                part = self._agreed(value, found) if found else self._begun(value, owner)
                parts.append(part if part is not None else self._edits.visible(value))
            arrived.append(parts)
        return arrived

    def _at_arriving(
        self, owner: Record, arrived: list[list[Value] | None], observers: list[New]
    ) -> Read:
        """Apply the edits at the gradients of an op's outputs."""
        plans = self._plans_of(owner)
        if plans is not None:
            arrived, observers = self._derivatives.insert(
                owner, plans.aligned_before.steps, arrived, "grad_outputs", owner.missing, observers
            )
            seen = self._seen_of(owner)
            for each in reversed(seen.after if seen is not None else []):
                arrived = self._derivatives.propagate_through_step(owner, each, arrived)
        return Read(arrived, observers)

    def _begun(self, value: Value, owner: Record) -> Value | None:
        """Return the initial gradient of a differentiation, as its caller reads it."""
        if owner.run is None or self._records is None:
            return None
        asking: Record | None = None
        if owner.run.around:
            around = (each for each in self._records.records if owner.is_within(each))
            asking = max(around, key=lambda each: each.start, default=None)
        found = [
            each
            for each in self._contributors(value, None)
            if owner.run.is_after(each[0]) and (asking is None or each[0].is_within(asking))
        ]
        of = self._results.get(value, ())
        asked = [each for each in found if self._key_of(*each) in of]
        version = self._agreed(value, asked or self._last(found))
        given = self._given(value, asking, None) if asking is not None else None
        if version is not None and given not in (None, version):
            assert asking is not None
            raise _is_both(asking)
        return version if given is None else given

    def _contributions(self, owner: Record) -> list[list[Value] | None]:
        """Return an op's contributions to its inputs' gradients, with the edits at its inputs
        applied.
        """
        known = self._in.get(id(owner))
        if known is None:
            known = self._in[id(owner)] = self._find_contributions(owner)
        self._observers.collect(known.observers)
        return known.gradients

    def _find_contributions(self, owner: Record) -> Read:
        plans = self._plans_of(owner)
        seen = self._seen_of(owner)
        with self._observers.collecting():
            arrived = self.arriving(owner)  # Its readers wait for these observers already.
        with self._observers.collecting() as observers:
            made = self._made_of(owner, plans, seen, arrived)
        for each in reversed(seen.before if seen is not None else []):
            made = self._derivatives.propagate_through_step(owner, each, made)
        if plans is not None:
            made, observers = self._derivatives.insert(
                owner, plans.aligned_after.steps, made, "grad_inputs", frozenset(), observers
            )
        return Read(made, observers)

    def _made_of(
        self,
        owner: Record,
        plans: OpPlans | None,
        seen: OpValues | None,
        arrived: list[list[Value] | None],
    ) -> list[list[Value] | None]:
        """Return what an op, or its replacement, contributes to its inputs' gradients, before
        edits.
        """
        replacement = plans.aligned_before.replacement if plans is not None else None
        made: list[list[Value] | None]
        if replacement is not None:
            made = self._derivatives.insert_replacement(
                owner, replacement, arrived, lost_inputs(owner)
            )
        elif seen is not None and seen.replacement is not None:
            lost = lost_inputs(owner)
            made = self._derivatives.differentiate_replacement(
                owner, seen.replacement, arrived, lost
            )
        else:
            made = [self._returned(owner, gradient) for gradient in owner.in_grads]
            if id(owner) in self._versions.ambiguous and seen is not None:
                made = self._derivatives.rerun_gradient(owner, seen, arrived)
        return made

    def _returned(self, owner: Record, gradient: Any) -> list[Value] | None:
        parts = []
        for tensor in components(gradient):
            value = self._body.value_of(tensor)
            if value is None:
                return None
            self._edits.visit(value.node)
            parts.append(self._read(value, owner))
        return parts or None

    def _plans_of(self, owner: Record) -> OpPlans | None:
        if not is_operator(owner.forward.type):
            return None
        plans = self._edits.analysis.plans_of(owner.forward)
        # The gradient of a backward op has no aligned view of its own.
        return plans if plans is not None and plans.context.is_forward() else None

    def _seen_there(self, owner: Record) -> OpValues | None:
        """Return the values of a gradient's op, in the body of that op."""
        if owner.forward.graph is self._body.graph:
            self._edits.visit(self._body.node_of(owner.forward))
            return self._edits.seen(owner.forward)
        return self._edits.around.forward_program.seen(owner.forward)

    def _seen_of(self, owner: Record) -> OpValues | None:
        seen = self._seen_there(owner)
        if seen is None or not (seen.before or seen.after or seen.replacement):
            return seen
        brought = OpValues(seen.op, seen.inputs, seen.outputs)

        def here(each: Differentiated) -> Differentiated:
            return each._replace(
                given=[self._derivatives.here(owner, value) for value in each.given]
            )

        brought.before, brought.after = [*map(here, seen.before)], [*map(here, seen.after)]
        if seen.replacement is not None:
            brought.replacement = here(seen.replacement)
        return brought


def _is_both(owner: Record) -> UnsupportedError:
    return UnsupportedError(
        f"One tensor is both a gradient that arrives at {owner.forward.name!r} and one that the "
        "op's gradient function computes itself. It was edited as the latter, and it is not known "
        "which one its reader needs",
        fix="Edit the gradient at the outputs of that op instead",
    )


def _count(value: Value, gradients: Iterable[Any]) -> int:
    """Count how often a tensor occurs among gradients and the components of slices."""
    key = (id(value.node.op), value.slot)
    return sum(key_of(part) == key for each in gradients for part in components(each))


def _ends_recomputation(node: Node) -> bool:
    """Return True if an op is the last one of a `tf.recompute_grad` gradient."""
    return node.op_type == "IdentityN" and any(
        frame.name in ENDS_OF_RECOMPUTATION
        for frame in node.op.traceback or ()
        if frame.filename == custom_gradient.__file__
    )


def _in_order(op_type: str) -> bool:
    """Return True if the gradient of an op type has an op that reads all gradients in order."""
    return is_container(op_type) or op_type in ("Split", "SplitV", "Unpack")
