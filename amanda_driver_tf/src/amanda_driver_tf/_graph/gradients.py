"""`Gradients`: the gradients of a body followed from contribution to contribution.

Owns what is inserted at gradients in the aligned view, and what replaces or differentiates the
gradient of an op. One tensor may be the gradient of several values (an addition passes its own on),
so gradients are told apart by the records and not by tensors; where these cannot be told apart
either, it is refused, for a wrong gradient would be silent. Over 400 lines: one subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.framework import ops

from amanda_core.errors import UnsupportedError
from amanda_core.plan import Step
from amanda_driver_tf._graph.analysis import OpPlans, is_operator
from amanda_driver_tf._graph.body import Node, Value
from amanda_driver_tf._graph.nodes import Host, Inlined
from amanda_driver_tf._graph.records import Record, Records, children_of, components
from amanda_driver_tf._graph.routines import (
    Flat,
    Layout,
    fold,
    of_gradients,
    replaced_backward,
    vector_jacobian,
)
from amanda_driver_tf._graph.shapes import of_same_rows
from amanda_driver_tf._graph.staging import static_shape, trace_gradient
from amanda_driver_tf._graph.versions import Differentiated, Key, Seen, key_of
from amanda_driver_tf._signature import signature_of

if TYPE_CHECKING:
    from amanda_driver_tf._graph.weave import Weaver

__all__ = ["Gradients"]


class Gradients:
    """The gradients that are computed in one body.

    Args:
        weaver: The weaver of the body.
    """

    def __init__(self, weaver: Weaver) -> None:
        self._weaver, self._body, self._records = weaver, weaver.body, weaver.records
        #: Number of an eager tensor, such as a variable's handle -> the argument that it is here.
        self._captured = {
            ops.tensor_id(outer): key_of(inner)
            for outer, inner in getattr(weaver.body.graph, "captures", ())
        }
        self._out: dict[int, list[list[Value] | None]] = {}
        self._in: dict[int, list[list[Value] | None]] = {}
        #: Gradients that are the result of a differentiation -> the tensors that it was asked for.
        self._results: dict[Value, list[Key]] = {}
        #: These, and gradients that are given to gradient functions.
        self._targets: dict[Value, list[Key]] = {}
        self._find_targets()

    def read(self, value: Value) -> Value | None:
        """What an ordinary reader of a gradient gets; None for what is no gradient."""
        of = self._results.get(value)
        found = self._contributors(value, of) or self._last(self._contributors(value, None))
        return self._agreed(value, found)

    def anew(self) -> list[tuple[Record, Step]]:
        """The gradients that other ops compute than those TensorFlow made, and why."""
        records = self._records.records if self._records is not None else ()
        return [(owner, step) for owner in records for step in self._steps_anew(owner)]

    def _steps_anew(self, owner: Record) -> list[Step]:
        forward = owner.forward
        if forward.graph is self._body.graph and self._body.node_of(forward) is None:
            return []
        plans, seen = self._plans_of(owner), self._seen_there(owner)
        steps: list[Step | None] = []
        if plans is not None:
            steps.append(plans.aligned_before.replacement)
            if id(owner) in self._weaver.ambiguous:
                steps += plans.before.steps
        if seen is not None:
            inserted = (*seen.before, *seen.after, seen.replacement)
            steps += [each.step for each in inserted if each is not None]
        return [step for step in steps if step is not None]

    def within(self, value: Value, owner: Record) -> Value | None:
        """A gradient that the gradient function of another op asked for itself, as it is read."""
        found = [each for each in self._contributors(value, None) if each[0].is_within(owner)]
        of = self._results.get(value, ())
        asked = [each for each in found if self._key_of(*each) in of]
        return self._agreed(value, asked or self._last(found))

    def passed_on(self, op: Any, behind: bool) -> set[int]:
        """Inputs of an op, or outputs, that have gradients, here or in a function, or are some."""
        tensors = op.outputs if behind else op.inputs
        found = {index for index, tensor in enumerate(tensors) if self._is_dense(tensor, op)}
        beside = [Records.of(child) for child in children_of(self._body.graph)]
        for noted in (self._records, *beside):
            for owner in noted.of_op(op) if noted is not None else ():
                for position, gradient in enumerate(owner.out_grads if behind else owner.in_grads):
                    # Slices may be of other rows.
                    if len(parts := components(gradient)) != 1:
                        continue
                    # Of another body's nobody knows which of them are wanted.
                    if noted is not self._records or self._body.value_of(parts[0]):
                        found.add(position)
                if behind:
                    found -= owner.missing
        return found

    def _is_dense(self, tensor: Any, reader: Any) -> bool:
        """Whether a tensor that an op reads or makes is a gradient, and not one of slices."""
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
        """Note which tensors a gradient is the whole gradient of."""
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
        """What tells the tensors of the forward program apart; None for what is no tensor."""
        if isinstance(tensor, ops.EagerTensor):
            return self._captured.get(ops.tensor_id(tensor))
        return key_of(tensor) if hasattr(tensor, "value_index") else None

    def accumulated(self, node: Node) -> list[Value]:
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
            result.append(gradient if gradient is not None else self._weaver.visible(value))
        return result

    def _contributors(self, value: Value, of: list[Key] | None) -> list[tuple[Record, int]]:
        """The gradients that a tensor is: of the tensors `of` if these are known, else of any."""
        if self._records is None or value.node.is_argument:
            return []
        found = self._records.contributions().get((id(value.node.op), value.slot), [])
        return [each for each in found if of is None or self._key_of(*each) in of]

    def _key_of(self, owner: Record, position: int) -> Key | None:
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
        index = next(i for i, t in enumerate(parts) if key_of(t) == (id(value.node.op), value.slot))
        return new[index] if new is not None else self._weaver.visible(value)

    def arriving(self, owner: Record) -> list[list[Value] | None]:
        """The gradients that an op's gradient function gets, those inserted ahead of it done."""
        known = self._out.get(id(owner))
        if known is not None:
            return known
        arrived: list[list[Value] | None] = []
        for position, gradient in enumerate(owner.out_grads):
            values = [self._body.value_of(tensor) for tensor in components(gradient)]
            if not values or any(value is None for value in values):
                arrived.append(None)
                continue
            of = None
            if position < len(owner.outputs):
                of = [key] if (key := self._key(owner.outputs[position])) is not None else []
            parts = []
            for value in values:
                assert value is not None
                self._weaver.visit(value.node)
                part = self._agreed(value, self._contributors(value, of))
                parts.append(part if part is not None else self._weaver.visible(value))
            arrived.append(parts)
        plans = self._plans_of(owner)
        if plans is not None:
            arrived = self._insert_at_gradients(
                owner, plans.aligned_before.steps, arrived, "grad_outputs", hide=owner.missing
            )
            seen = self._seen_of(owner)
            for each in reversed(seen.after if seen is not None else []):
                arrived = self._differentiate(owner, each, arrived)
        self._out[id(owner)] = arrived
        return arrived

    def _contributions(self, owner: Record) -> list[list[Value] | None]:
        """What an op contributes to its inputs' gradients, those inserted behind it done."""
        known = self._in.get(id(owner))
        if known is not None:
            return known
        plans = self._plans_of(owner)
        seen = self._seen_of(owner)
        arrived = self.arriving(owner)
        replacement = plans.aligned_before.replacement if plans is not None else None
        made: list[list[Value] | None]
        if replacement is not None:
            made = self._replace_backward(owner, replacement, arrived)
        elif seen is not None and seen.replacement is not None:
            made = self._through(owner, seen.replacement, arrived)
        else:
            made = [self._returned(owner, gradient) for gradient in owner.in_grads]
            if id(owner) in self._weaver.ambiguous and seen is not None:
                made = self._differentiate_op(owner, seen, arrived)
        for each in reversed(seen.before if seen is not None else []):
            made = self._differentiate(owner, each, made)
        if plans is not None:
            made = self._insert_at_gradients(
                owner, plans.aligned_after.steps, made, "grad_inputs", hide=frozenset()
            )
        self._in[id(owner)] = made
        return made

    def _returned(self, owner: Record, gradient: Any) -> list[Value] | None:
        parts = []
        for tensor in components(gradient):
            value = self._body.value_of(tensor)
            if value is None:
                return None
            self._weaver.visit(value.node)
            parts.append(self._weaver.read_in_gradient(value, owner))
        return parts or None

    def _plans_of(self, owner: Record) -> OpPlans | None:
        if not is_operator(owner.forward.type):
            return None
        plans = self._weaver.analysis.plans_of(owner.forward)
        # Gradients of gradients have no aligned view of their own.
        return plans if plans is not None and plans.context.is_forward() else None

    def _seen_there(self, owner: Record) -> Seen | None:
        """What the op of a gradient saw and made, as values of the body that it stands in."""
        if owner.forward.graph is self._body.graph:
            return self._weaver.seen(owner.forward)
        return self._weaver.foreign.seen(owner.forward)

    def _seen_of(self, owner: Record) -> Seen | None:
        seen = self._seen_there(owner)
        if seen is None or not (seen.before or seen.after or seen.replacement):
            return seen
        brought = Seen(seen.op, seen.inputs, seen.outputs)

        def here(each: Differentiated) -> Differentiated:
            return each._replace(given=[self._here(owner, value) for value in each.given])

        brought.before, brought.after = [*map(here, seen.before)], [*map(here, seen.after)]
        if seen.replacement is not None:
            brought.replacement = here(seen.replacement)
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
            whole = [len(gradients[index] or ()) == 1 for index, _ in places]
            flat = of_gradients(flat, step, [at for at, alone in enumerate(whole) if alone])
            made = self._weaver.insert(
                f"{owner.forward.name}/{where}", flat, flat_values, dtypes, step
            )
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
        # Slices may be of other rows.
        shapes = [
            static_shape(value) if len(returned[index] or ()) == 1 else None
            for value, (index, _) in zip(targets, places, strict=True)
        ]
        flat = replaced_backward(step, given, made_layout, dtypes, shapes)
        rows = {i: self._rows(owner, parts[1]) for i, parts in _slices(returned)}
        if rows:
            flat = _of_same_rows(flat, len(values), [places.index((i, 0)) for i in rows], step)
        values = [*values, *rows.values()]
        made = self._weaver.insert(f"{owner.forward.name}/backward", flat, values, dtypes, step)
        return _placed(len(owner.in_grads), places, made)

    def _rows(self, owner: Record, indices: Value) -> Value:
        self._weaver.visit(indices.node)
        return self._weaver.read_in_gradient(indices, owner)

    def _dense(self, gradient: Any) -> list[Value] | None:
        parts = [self._body.value_of(tensor) for tensor in components(gradient)]
        return [part for part in parts if part is not None] or None

    def _through(
        self, owner: Record, replacement: Differentiated, arrived: list[list[Value] | None]
    ) -> list[list[Value] | None]:
        """The gradient of a replacement of the op, differentiated as it is written."""
        result: list[list[Value] | None] = [None] * len(owner.in_grads)
        wanted = [
            index
            for index, value in enumerate(replacement.given[: len(owner.in_grads)])
            if _is_real(value.dtype) and owner.in_grads[index] is not None
        ]
        ahead = [index for index, parts in enumerate(arrived) if parts is not None]
        made = self._derivative(owner, replacement, ahead, arrived, wanted)
        for index, value in zip(wanted, made, strict=True):
            if len(components(owner.in_grads[index])) > 1:
                raise UnsupportedError(
                    f"The gradient of {owner.forward.name!r} is tf.IndexedSlices, and the op was "
                    "replaced",
                    where=replacement.step.where,
                    fix="Insert something before or after the op, or run it eagerly",
                )
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
        made = self._weaver.add(Inlined(name, function, values, dtypes))
        result: list[list[Value] | None] = [None] * len(owner.in_grads)
        for index, value in zip(wanted, made, strict=True):
            result[index] = [value]
        return result

    def _here(self, owner: Record, value: Value) -> Value:
        if owner.forward.graph is self._body.graph:
            return self._weaver.loops.bring(value, owner)
        return self._weaver.foreign.bring(value)

    def _differentiate(
        self,
        owner: Record,
        inserted: Differentiated,
        gradients: list[list[Value] | None],
    ) -> list[list[Value] | None]:
        """Gradients behind a step as gradients ahead of it; its outputs are its inputs' places."""
        _, given, selected, _ = inserted
        result = list(gradients)
        ahead = [
            place
            for place, index in enumerate(selected)
            if index < len(gradients) and gradients[index] is not None
        ]
        wanted = [place for place in ahead if _is_real(given[place].dtype)]
        arrived = [gradients[index] if index < len(gradients) else None for index in selected]
        made = self._derivative(owner, inserted, ahead, arrived, wanted)
        for place, value in zip(wanted, made, strict=True):
            result[selected[place]] = [value]
        return result

    def _derivative(
        self,
        owner: Record,
        inserted: Differentiated,
        ahead: list[int],
        arrived: Sequence[list[Value] | None],
        wanted: list[int],
    ) -> list[Value]:
        """Gradients of the `wanted` inputs of a function from those of its outputs `ahead`."""
        if not ahead or not wanted:
            return []
        flat, given, _, step = inserted
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

        derivative = vector_jacobian(forward, len(given), step)

        def run(tensors: list[Any]) -> list[Any]:
            found = derivative(tensors)
            return [found[index] for index in wanted]

        dtypes = [given[index].dtype for index in wanted]
        return self._weaver.add(
            Host(f"{owner.forward.name}/derivative", run, [*given, *values], dtypes)
        )


def _slices(gradients: Sequence[list[Value] | None]) -> list[tuple[int, list[Value]]]:
    """Those of the gradients that are slices."""
    return [(i, parts) for i, parts in enumerate(gradients) if parts is not None and len(parts) > 1]


def _of_same_rows(flat: Flat, count: int, places: Sequence[int], step: Step) -> Flat:
    """A replacement that makes slices of the rows that stand behind its `count` arguments."""

    def run(tensors: list[Any]) -> list[Any]:
        new = flat(tensors[:count])
        for place, rows in zip(places, tensors[count:], strict=True):
            slices = tf.IndexedSlices(new[place], new[place + 1])
            new[place] = of_same_rows(slices, rows, step)
        return new

    return run


# Of the DataTypes those that are differentiated: float, double, complex, half, bfloat16.
_REAL = frozenset({1, 2, 8, 14, 18, 19})


def _is_real(dtype: int) -> bool:
    return dtype in _REAL


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
