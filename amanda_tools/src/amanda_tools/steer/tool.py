"""`Steer`: chosen values of modules and operators, changed while a model runs.

Owns to which part of a value a change applies. Choosing is `sequences`', and the arithmetic is
`changes`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

from amanda_core import OpContext
from amanda_core.engine.calls import MODULE_VALUES
from amanda_core.errors import SelectionError, ToolError
from amanda_core.interface.facts import Facts
from amanda_core.weights.reads import Weight
from amanda_tools.kit.sequences.places import Area, NotChoosableError, Places
from amanda_tools.kit.sequences.tool import SequenceTool
from amanda_tools.kit.tensors.arithmetic import tensor_like
from amanda_tools.kit.tensors.types import is_floating, type_of
from amanda_tools.kit.tensors.values import facts_of, need_numpy
from amanda_tools.kit.weights.baking import Edit as WeightEdit
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.kit.weights.coverage import UnreachedWeight, WeightCoverage
from amanda_tools.kit.weights.edited_reads import EditedReads
from amanda_tools.steer.changes import Edit, steered
from amanda_tools.steer.result import SteeredOp, SteerResult

__all__ = ["Edit", "Steer"]


class Steer(SequenceTool["_Op"], BakingTool):
    """Changes chosen values: of modules or operators, at chosen calls, rows and positions.

    What is not chosen stays the same bit for bit. Restrict it to calls of the model, such as the
    decoding steps of ``generate``, by ``where(amanda.select(calls=range(1, 33)))``.

    Args:
        edit: ``add`` adds `factor` times the vector; ``scale`` multiplies by `factor`; ``replace``
            puts the vector in place of the value; ``project`` takes `factor` times the part along
            the vector away; ``ablate`` sets to zero.
        vector: For ``add``, ``replace`` and ``project``: numbers along the last axis, as a list, an
            array, or the path of a ``.npy`` file or of a ``.safetensors`` file with one tensor.
        factor: See `edit`.
        modules: Patterns of the modules whose output (or input) is changed: the first tensor that
            their call returns (or is given).
        ops: Patterns of the operators of which one output (or input) is changed.
        value: ``outputs`` or ``inputs``.
        operand: Which output or input of an operator, by its position in the signature.
        neurons: For ``scale`` and ``ablate``: only these indices of the last axis.
        heads: For ``scale`` and ``ablate``: only these of `of_heads` equal parts of the last axis.
        of_heads: How many heads the last axis holds.
        positions: Absolute positions in the sequence: a number, a list, or text such as ``2:8``. A
            negative one counts from the end of what a call computes. All if left out.
        rows: Rows of the batch; likewise.
        axis: The axis of positions in the values, if it is not the one after the rows.

    Raises:
        ValueError: An option has none of its values, is missing, or nothing is chosen.
        ImportError: NumPy, or safetensors for such a file, is not installed.

    >>> tool = Steer("ablate", modules=["*.o_proj"], value="inputs", heads=[2], of_heads=8)
    """

    whole = True
    words: ClassVar[tuple[str, str]] = ("steered", "original")
    otherwise: ClassVar[str] = "Not all operators can read these weights changed"

    def __init__(
        self,
        edit: Edit,
        vector: Any = None,
        factor: float = 1.0,
        modules: list[str] | None = None,
        ops: list[str] | None = None,
        value: Literal["outputs", "inputs"] = "outputs",
        operand: int = 0,
        neurons: list[int] | None = None,
        heads: list[int] | None = None,
        of_heads: int | None = None,
        positions: list[int] | str | None = None,
        rows: list[int] | str | None = None,
        axis: int | None = None,
    ) -> None:
        if edit not in get_args(Edit):
            raise ValueError(f"edit must be of {', '.join(get_args(Edit))}, not {edit!r}")
        if value not in ("outputs", "inputs"):
            raise ValueError(f"value must be outputs or inputs, but is {value!r}")
        if operand < 0:
            raise ValueError(f"operand must not be negative, but is {operand}")
        places = Places(positions, rows, axis)
        super().__init__(modules, ops, value == "inputs", value == "outputs", places)
        need_numpy()
        if (vector is None) == (edit in ("add", "replace", "project")):
            raise ValueError(f"{edit} {'needs a' if vector is None else 'takes no'} vector")
        parts = [
            name for name, part in (("neurons", neurons), ("heads", heads)) if part is not None
        ]
        if parts and edit not in ("scale", "ablate"):
            raise ValueError(f"{parts[0]} are for scale and ablate, not for {edit}")
        if len(parts) > 1:
            raise ValueError("give neurons or heads, not both")
        if (heads is None) != (of_heads is None):
            raise ValueError("heads and of_heads go together: heads=[0], of_heads=12")
        for name, indices, end in (("neurons", neurons, None), ("heads", heads, of_heads)):
            for index in indices or ():
                if index < 0 or (end is not None and index >= end):
                    raise ValueError(f"{name} must be from 0 on, below {end or 'their number'}")
        self.edit, self.factor, self.operand = edit, factor, operand
        self._neurons, self._heads, self._of_heads = neurons, heads, of_heads
        self._coverage = WeightCoverage(self)
        self._reads = EditedReads()
        if modules or value == "outputs":
            self.refuse_baking("changes activations with these options")
        elif not places.are_all:
            self.refuse_baking("changes some positions or rows")
        if self.cannot_bake:
            del self.saves_to
        self._vector: Any = None
        if vector is not None:
            self._vector = _array(vector)
        if edit == "project" and not (self._vector * self._vector).sum() > 0:
            raise ValueError("the vector to project out must not be zero")
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)

    def analyse(self, context: OpContext) -> None:
        """Change the input of a chosen op."""
        if not self.cannot_bake:
            self.note_weights(context)
        if not self.is_chosen(context):
            self._reads.add(context)
            return
        op = self.account_of(context, lambda: _Op(context))
        if self.wants_inputs(context):
            op.facts.what = "input"
            self._note_weights(context)
            if self.operand in context.weights:
                self._reads.add(context, self.operand, lambda: lambda seen: self._steered(seen, op))
            else:
                self.refuse_baking(f"changes input {self.operand} of {context.name}")
            if self._is_part(context):
                given = (context.get_inputs() or ())[self.operand]
                if constants := self._in_program(given, op):
                    context.insert_before_op(steered, inputs=[self.operand], **constants)
                return
            varies = any(weight.varies for weight in context.weights.values())
            context.insert_before_op(
                self.change, inputs=[self.operand], op=op, context=context if varies else None
            )

    def analyse_outputs(self, context: OpContext) -> None:
        """Change the output of a chosen op."""
        op = self.known(context)
        if op is None or not self.wants_outputs(context):
            return
        op.facts.what = self.kind_of_output(context)
        operand = 0 if context.op_type in MODULE_VALUES else self.operand
        if not self._is_part(context):
            context.insert_after_op(self.change, outputs=[operand], op=op)
        elif constants := self._in_program((context.get_outputs() or ())[operand], op):
            context.insert_after_op(steered, outputs=[operand], **constants)

    def before_export(self) -> None:
        """Refuse positions and rows, which are those of one call.

        Raises:
            ToolError: Not all positions and rows are chosen.
        """
        if not self._places.are_all:
            raise ToolError(
                "Positions and rows are those of one call, and a program is for all calls",
                where=f"{self.tool_name}.before_export",
                fix="Leave positions and rows out",
            )

    def change(self, value: Any, op: _Op, context: OpContext | None = None) -> Any:
        """Return the value with its chosen part changed; None if nothing is chosen."""
        with self._clock, self._lock:
            if context is not None:
                self._note_weights(context)
            facts, span = op.tensors, self._span
            if op.facts.calls is not None:
                op.facts.calls += 1
            _need_tensor(value, op)
            if not op.facts.shape:
                op.facts.shape = str(type_of(facts, value))
            if not is_floating(facts, value):
                return None  # Such as an index: an edit would change its dtype or lose the factor.
            area = None
            if not self._places.are_all:
                try:
                    if span is not None and not all(self._places.chosen_in(span)):
                        return None
                    area = self._places.area(_shape(facts, value), span)
                except NotChoosableError as error:
                    raise SelectionError(
                        f"Its positions cannot be chosen: {error}",
                        where=op.where,
                        fix="Leave positions and rows out, give axis=..., or choose other values",
                    ) from None
            if op.facts.changed is not None:
                op.facts.changed += 1
            if area is not None:
                each = 1 if area.by_row else len(area.offsets)
                op.facts.positions = (op.facts.positions or 0) + len(area.rows) * each
            return self._steered(value, op, area)

    def baked(self, weight: Weight) -> WeightEdit | None:
        """Return the change of a parameter of which an input is changed."""
        return self._reads.edit_of(weight)

    def read_otherwise(self) -> list[UnreachedWeight]:
        """Return the weights that are not changed in the same way wherever they are read."""
        return self._reads.read_otherwise()

    def result(self) -> SteerResult:
        """Return what was changed so far."""
        with self._lock:
            return SteerResult(
                self.edit,
                [replace(op.facts) for op in self._ops.values()],
                self.notes,
                self._clock.spent / 1e9,
                self._clock.wall / 1e9,
                *self._coverage.figures("not chosen"),
            )

    def _note_weights(self, context: OpContext) -> None:
        reads = context.weights
        weight = reads.get(self.operand)
        if weight is not None:
            self._coverage.add_parameters(reads, context.zone, context.name)
            self._coverage.add_reached(weight)

    def _steered(self, value: Any, op: _Op, area: Area | None = None) -> Any:
        """Return the value with its chosen part changed; the value itself if it is of integers."""
        if not is_floating(op.tensors, value):
            return value
        return steered(value, **self._constants(value, op, area))

    def _is_part(self, context: OpContext) -> bool:
        """Return True if the change is a part of the program that is compiled or exported."""
        compiled = context.namespace.endswith("/compiled") and self._places.are_all
        return self.is_exported or compiled

    def _in_program(self, value: Any, op: _Op) -> dict[str, Any]:
        """Return the arguments of `steered` for the values of a program; none for integers."""
        _need_tensor(value, op)
        op.facts.shape = op.facts.shape or str(type_of(op.tensors, value))
        if not is_floating(op.tensors, value):
            return {}
        op.facts.calls = op.facts.changed = None
        return self._constants(value, op)

    def _constants(self, like: Any, op: _Op, area: Area | None = None) -> dict[str, Any]:
        """Return the arguments of `steered` for values like this one."""
        facts, vector = op.tensors, self._vector
        if self.edit == "project" and not _has_rows(facts, like):
            raise SelectionError(
                "The projection needs the values that other processes hold",
                where=op.where,
                fix="Choose an operator whose values each process has as a whole",
            )
        if vector is not None:
            if self.edit == "add":
                vector = self.factor * vector
            elif self.edit == "project":
                vector = vector / (vector * vector).sum() ** 0.5
            vector = tensor_like(facts, vector, like)
        mask = self._mask(facts, like, area, op)
        return {
            "facts": facts,
            "edit": self.edit,
            "factor": self.factor,
            "vector": vector,
            "mask": None if mask is None else facts.tensor(mask, like),
        }

    def _mask(self, facts: Facts, value: Any, area: Area | None, op: _Op) -> Any:
        """Return which elements change, as an array that fits the value; None for all."""
        import numpy

        shape = _shape(facts, value)
        found: Any = None
        if area is not None and not area.is_all:
            found = numpy.zeros([*area.shape[: area.axis + 1]], bool)
            if area.by_row:
                numpy.moveaxis(found, area.axis, 1)[area.rows, area.offsets] = True
            else:
                chosen = [slice(None)] * (area.axis + 1)
                chosen[0] = cast("slice", area.rows)
                picked = numpy.zeros(area.shape[area.axis], bool)
                picked[area.offsets] = True
                found[tuple(chosen)] = picked
            if shape != area.shape:  # Rows and positions in one axis.
                found = found.reshape(-1)
            rank = len(shape or ())
            found = found.reshape(*found.shape, *[1] * (rank - found.ndim))
        channels = self._channels(shape, op)
        if channels is None:
            return found
        return channels if found is None else found & channels

    def _channels(self, shape: Sequence[int | None] | None, op: _Op) -> Any:
        """Return which indices of the last axis change; None for all."""
        import numpy

        if self._neurons is None and self._heads is None:
            return None
        size = shape[-1] if shape else None
        chosen = numpy.zeros(size or 0, bool)
        if self._heads is not None:
            if not size or size % (self._of_heads or 1):
                raise SelectionError(
                    f"The last axis, of {size}, does not hold {self._of_heads} heads",
                    where=op.where,
                    fix="Choose the input of the layer after attention, or another of_heads",
                )
            chosen.reshape(self._of_heads or 1, -1)[self._heads] = True
        else:
            if not size or max(self._neurons or [0]) >= size:
                raise SelectionError(
                    f"The last axis, of {size}, has no neuron {max(self._neurons or [0])}",
                    where=op.where,
                    fix="Choose indices of the last axis",
                )
            chosen[self._neurons] = True
        return chosen


class _Op:
    """One operator that is steered."""

    def __init__(self, context: OpContext) -> None:
        self.tensors, self.where = facts_of(context), context.where
        self.facts = SteeredOp.of(context)


def _shape(facts: Facts, value: Any) -> tuple[int | None, ...] | None:
    """Return the shape of a value, of the whole one if processes hold parts of it."""
    placement = facts.placement(value)
    return facts.shape(value) if placement is None else placement.shape


def _has_rows(facts: Facts, value: Any) -> bool:
    """Return True if this process has all of the last axis of a value."""
    placement = facts.placement(value)
    if placement is None or not placement.shape:
        return True
    last = None if placement.parts is None or placement.partial else placement.parts[-1]
    return last == slice(0, placement.shape[-1])


def _need_tensor(value: Any, op: _Op) -> None:
    if not op.tensors.is_tensor(value):
        raise SelectionError(
            f"A {type(value).__name__} cannot be steered: it is not a tensor",
            where=op.where,
            fix="Choose another one by operand=...",
        )


def _array(vector: Any) -> Any:
    """Return a vector as a NumPy array.

    Raises:
        ValueError: It is not an array of numbers, or its file has several.
    """
    import numpy

    if isinstance(vector, (str, Path)):
        path = Path(vector)
        if path.suffix == ".safetensors":
            from amanda_tools.kit.output.extras import need_safetensors

            tensors = need_safetensors().load_file(path)
            if len(tensors) != 1:
                raise ValueError(f"{str(path)!r} must hold one tensor, but holds {len(tensors)}")
            (vector,) = tensors.values()
        else:
            vector = numpy.load(path, allow_pickle=False)
    found = numpy.asarray(vector)
    if found.dtype.kind not in "fiu" or not found.size or not numpy.isfinite(found).all():
        raise ValueError(f"the vector must be of finite numbers, but is of {found.dtype}")
    return found if found.dtype.kind == "f" else found.astype(numpy.float32)
