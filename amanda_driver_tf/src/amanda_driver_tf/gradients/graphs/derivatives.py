"""`Derivatives`: inserts the nodes that compute gradients instead of TensorFlow's ops.

Owns the new nodes at gradients: the steps of the aligned view, replacements of an op's whole
gradient, and derivatives of edits that are differentiated as written. `gradient_versions` decides
which versions these nodes read and who reads their outputs. A little over 400 lines: one class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.analysis import is_operator
from amanda_driver_tf.graphs.body import Node, Value
from amanda_driver_tf.graphs.records import Record, components
from amanda_driver_tf.insertion.body_edits import BodyEdits
from amanda_driver_tf.insertion.jacobians import vector_jacobian
from amanda_driver_tf.insertion.nodes import Flat, Host, Inlined, New
from amanda_driver_tf.insertion.observers import Observers
from amanda_driver_tf.insertion.op_values import Differentiated, OpValues, is_discrete
from amanda_driver_tf.insertion.shape_checks import check_same_rows
from amanda_driver_tf.insertion.staging import static_shape, trace_gradient
from amanda_driver_tf.insertion.step_functions import (
    Layout,
    backward_replacement_function,
    fold,
    keep_gradient_shapes,
)
from amanda_driver_tf.operators.signature import signature_of

__all__ = ["Derivatives", "ReadReturned"]

#: Returns the version of a value, in TensorFlow's wiring, that a gradient function returns.
ReadReturned = Callable[[Value, Record], Value]


def _indices(lengths: Sequence[int | None], positions: Sequence[int] | None) -> set[int]:
    """Return the indices of the flat gradients at `positions`; None means all positions."""
    found: set[int] = set()
    start = 0
    for position, length in enumerate(lengths):
        stop = start + (1 if length is None else length)
        if positions is None or position in positions:
            found.update(range(start, stop))
        start = stop
    return found


class Derivatives:
    """The gradients of one body that new nodes compute instead of TensorFlow's ops.

    Each gradient is a list of values: one, or the components of slices. A missing gradient is None.

    Args:
        edits: The edits of the body.
        observers: Its observers.
        read: Returns the version of a value that a gradient function returns.
    """

    def __init__(self, edits: BodyEdits, observers: Observers, read: ReadReturned) -> None:
        self._edits, self._body = edits, edits.body
        self._observers, self._read = observers, read
        #: Gradient (by identity) -> the nodes that its gradient function made; filled when needed.
        self._made_by: dict[int, list[Node]] = {}

    def insert(
        self,
        owner: Record,
        steps: Sequence[Step],
        gradients: list[list[Value] | None],
        where: str,
        hide: frozenset[int],
        observers: list[New],
    ) -> tuple[list[list[Value] | None], list[New]]:
        """Insert steps of the aligned view.

        Args:
            owner: The gradient.
            steps: The steps.
            gradients: The gradients that the steps are applied to.
            where: ``grad_outputs`` or ``grad_inputs``.
            hide: Indices of gradients that are hidden from the steps.
            observers: Observers that the new nodes have to wait for.

        Returns:
            The edited gradients, and the observers that their readers have to wait for.
        """
        for step in steps:
            lengths = _gradient_lengths(owner, where)
            if self._observers.include(step):
                observers = self._observe(owner, step, lengths, gradients, where, hide, observers)
                continue
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
            flat = keep_gradient_shapes(flat, step, [at for at, alone in enumerate(whole) if alone])
            made = self._edits.insert(
                f"{owner.forward.name}/{where}", flat, flat_values, dtypes, step
            )
            made[0].node.controls += observers
            observers = []
            gradients = [list(parts) if parts is not None else None for parts in gradients]
            for (index, part), value in zip(places, made, strict=True):
                parts = gradients[index]
                assert parts is not None
                parts[part] = value
        return gradients, observers

    def _observe(
        self,
        owner: Record,
        step: Step,
        lengths: Sequence[int | None],
        gradients: list[list[Value] | None],
        where: str,
        hide: frozenset[int],
        observers: list[New],
    ) -> list[New]:
        """Insert an observer of gradients. It does not see gradients that nothing needs.

        Returns:
            The observers that readers of the gradients have to wait for.
        """
        chosen = _indices(lengths, step.action.positions)
        shown = [
            parts if i in chosen and i not in hide and self._is_running(parts) else None
            for i, parts in enumerate(gradients)
        ]
        layout, values, _ = _gradient_layout(lengths, shown, owner, where)
        if not values:
            return observers
        made = self._observers.insert(f"{owner.forward.name}/{where}", [step], layout, values)
        made.controls += observers
        self._edits.kept.add_after(made, values[0].node)
        return [made]

    def _is_running(self, parts: Sequence[Value] | None) -> bool:
        """Return True if a gradient is computed anyway, as an edited one is."""
        running = self._body.running
        return parts is not None and all(
            not isinstance(part.node, Node) or id(part.node) in running for part in parts
        )

    def insert_replacement(
        self, owner: Record, step: Step, arrived: list[list[Value] | None], lost: Sequence[int]
    ) -> list[list[Value] | None]:
        """Insert a replacement of an op's whole gradient and return the gradients of the op's
        inputs.

        Args:
            owner: The gradient.
            step: The replacement.
            arrived: The gradients of the op's outputs.
            lost: Inputs that must have no gradient, since nothing would read it.
        """
        self._observers.include(step)
        shown = [None if i in owner.missing else parts for i, parts in enumerate(arrived)]
        given, values, _ = _gradient_layout(
            _gradient_lengths(owner, "grad_outputs"), shown, owner, "grad_outputs"
        )
        returned = [self._dense(gradient) for gradient in owner.in_grads]
        for index, tensor in enumerate(owner.inputs[: len(returned)]):
            if is_discrete(tensor.dtype):
                returned[index] = None  # Some gradient functions return zeros for integer inputs.
        lengths = _gradient_lengths(owner, "grad_inputs")
        made_layout, targets, places = _gradient_layout(lengths, returned, owner, "grad_inputs")
        absent = Layout(lengths, [index in lost for index in range(len(owner.in_grads))])
        dtypes = [value.dtype for value in targets]
        # Slices may be of other rows.
        shapes = [
            static_shape(value) if len(returned[index] or ()) == 1 else None
            for value, (index, _) in zip(targets, places, strict=True)
        ]
        flat = backward_replacement_function(step, given, made_layout, absent, dtypes, shapes)
        rows = {i: self._rows(owner, parts[1]) for i, parts in _slices(returned)}
        if rows:
            flat = _with_row_checks(flat, len(values), [places.index((i, 0)) for i in rows], step)
        values = [*values, *rows.values()]
        made = self._edits.insert(f"{owner.forward.name}/backward", flat, values, dtypes, step)
        return _placed(len(owner.in_grads), places, made)

    def _rows(self, owner: Record, indices: Value) -> Value:
        self._edits.visit(indices.node)
        return self._read(indices, owner)

    def _dense(self, gradient: Any) -> list[Value] | None:
        parts = [self._body.value_of(tensor) for tensor in components(gradient)]
        return [part for part in parts if part is not None] or None

    def differentiate_replacement(
        self,
        owner: Record,
        replacement: Differentiated,
        arrived: list[list[Value] | None],
        lost: Sequence[int],
    ) -> list[list[Value] | None]:
        """Differentiate an op's replacement as it is written and return the gradients of its
        inputs.

        Args:
            owner: The gradient.
            replacement: The replacement.
            arrived: The gradients of the op's outputs.
            lost: Inputs that must have no gradient, since nothing would read it.
        """
        result: list[list[Value] | None] = [None] * len(owner.in_grads)
        wanted = [
            index
            for index, value in enumerate(replacement.given[: len(owner.in_grads)])
            if _is_real(value.dtype) and owner.in_grads[index] is not None
        ]
        ahead = [index for index, parts in enumerate(arrived) if parts is not None]
        made = self._derivative(owner, replacement, ahead, arrived, wanted, lost)
        for index, value in zip(wanted, made, strict=True):
            if len(components(owner.in_grads[index])) > 1:
                raise UnsupportedError(
                    f"{owner.forward.name!r} was replaced, but its gradient is tf.IndexedSlices, "
                    "which a replacement cannot have",
                    where=replacement.step.where,
                    fix="Insert something before or after the op, or run it eagerly",
                )
            result[index] = [value]
        return result

    def rerun_gradient(
        self, owner: Record, seen: OpValues, arrived: list[list[Value] | None]
    ) -> list[list[Value] | None]:
        """Call the op's own gradient function again, with the inputs that the op ran on."""
        ahead = [i for i, parts in enumerate(arrived) if parts is not None and len(parts) == 1]
        wanted = [i for i, gradient in enumerate(owner.in_grads) if gradient is not None]
        inputs = [self.here(owner, value) for value in seen.inputs]
        values = [*inputs, *((arrived[index] or [])[0] for index in ahead)]
        name = f"{owner.forward.name}/gradient"
        function = trace_gradient(name, owner.forward, ahead, wanted, values)
        dtypes = [inputs[index].dtype for index in wanted]
        made = self._edits.add(Inlined(name, function, values, dtypes))
        self._report_replaced_ops(owner)
        result: list[list[Value] | None] = [None] * len(owner.in_grads)
        for index, value in zip(wanted, made, strict=True):
            result[index] = [value]
        return result

    def _report_replaced_ops(self, owner: Record) -> None:
        """Report the routines at TensorFlow's backward ops of a gradient, since these ops no longer
        run.
        """
        if not self._made_by:
            for node in self._edits.body.nodes:
                made_by = self._edits.owner(node.op)
                if made_by is not None:
                    self._made_by.setdefault(id(made_by), []).append(node)
        for node in self._made_by.get(id(owner), ()):
            plans = self._edits.analysis.plans_of(node.op) if is_operator(node.op_type) else None
            if plans is not None and (plans.before or plans.after):
                self._edits.unmet_requests[f"routines at {node.name!r}, a backward op"] = (
                    f"the gradient of {owner.forward.name!r} is computed again, as it reads one "
                    "tensor that the op has seen in several versions"
                )

    def here(self, owner: Record, value: Value) -> Value:
        """Return a value of the forward op's body as a value of this body."""
        if owner.forward.graph is self._body.graph:
            return value
        return self._edits.around.forward_program.bring(value)

    def propagate_through_step(
        self,
        owner: Record,
        inserted: Differentiated,
        gradients: list[list[Value] | None],
    ) -> list[list[Value] | None]:
        """Propagate gradients backwards through a step, whose outputs stand for its inputs."""
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
        lost: Sequence[int] = (),
    ) -> list[Value]:
        """Return gradients of the `wanted` inputs of a step, given those of its outputs `ahead`."""
        if not ahead or not wanted:
            return []
        flat, given, _, step = inserted
        values: list[Value] = []
        for index in ahead:
            parts = arrived[index] or []
            if len(parts) != 1:
                raise UnsupportedError(
                    f"The edit of {owner.forward.name!r} is to be differentiated, but the gradient "
                    "there is tf.IndexedSlices",
                    fix="Leave autodiff_enabled() out for this op",
                )
            values += parts

        def forward(tensors: list[Any]) -> list[Any]:
            outputs = flat(tensors)
            return [outputs[index] for index in ahead]

        derivative = vector_jacobian(forward, len(given), step, lost)

        def run(tensors: list[Any]) -> list[Any]:
            found = derivative(tensors)
            return [found[index] for index in wanted]

        dtypes = [given[index].dtype for index in wanted]
        return self._edits.add(
            Host(f"{owner.forward.name}/derivative", run, [*given, *values], dtypes)
        )


def _gradient_lengths(owner: Record, where: str) -> list[int | None]:
    if where == "grad_outputs":
        return [None] * len(owner.out_grads)
    signature = signature_of(owner.forward.type)
    if signature is None or len(owner.in_grads) != len(owner.forward.inputs):
        return [None] * len(owner.in_grads)
    return list(signature.lengths(owner.forward.get_attr))


def _slices(gradients: Sequence[list[Value] | None]) -> list[tuple[int, list[Value]]]:
    """Return the gradients that are slices, with their indices."""
    return [(i, parts) for i, parts in enumerate(gradients) if parts is not None and len(parts) > 1]


def _with_row_checks(flat: Flat, count: int, places: Sequence[int], step: Step) -> Flat:
    """Wrap a replacement so that its slices must have the row indices given after its arguments."""

    def run(tensors: list[Any]) -> list[Any]:
        new = flat(tensors[:count])
        for place, rows in zip(places, tensors[count:], strict=True):
            slices = tf.IndexedSlices(new[place], new[place + 1])
            new[place] = check_same_rows(slices, rows, step)
        return new

    return run


# DataTypes that have gradients: float, double, both complex types, half, bfloat16.
_REAL = frozenset({1, 2, 8, 14, 18, 19})


def _is_real(dtype: int) -> bool:
    return dtype in _REAL


def _gradient_layout(
    lengths: Sequence[int | None],
    gradients: Sequence[list[Value] | None],
    owner: Record,
    where: str,
) -> tuple[Layout, list[Value], list[tuple[int, int]]]:
    """Return the layout of gradients, their flat tensors, and the (gradient, component) of each
    tensor.
    """
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
