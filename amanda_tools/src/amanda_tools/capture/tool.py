"""`Capture`: chosen values of modules and operators, to memory or to files.

Owns what is taken when, and the bound on memory. The index is `result`'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from amanda_core import OpContext
from amanda_core.engine.calls import MODULE_VALUES
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_core.results.records import record_folder
from amanda_tools.capture.result import INDEX, CapturedOp, CapturedValue, CaptureResult
from amanda_tools.dump.files import Writer, reserve
from amanda_tools.dump.index import LeftOut
from amanda_tools.kit.output.extras import need_safetensors
from amanda_tools.kit.sequences.places import Area, NotChoosableError, Places
from amanda_tools.kit.sequences.tool import SequenceTool
from amanda_tools.kit.tensors.values import HostTensor, facts_of, host, need_numpy, tensors_in

__all__ = ["Capture"]

_VALUES = ("inputs", "outputs")


class Capture(SequenceTool["_Op"]):
    """Keeps chosen values of modules and operators, with their rows and positions.

    What is not chosen is not instrumented. Restrict it to calls of the model, such as the decoding
    steps of ``generate``, by ``where(amanda.select(calls=range(1, 33)))``.

    Args:
        modules: Patterns of the modules whose outputs (or inputs) are captured: the first tensor
            that their call returns (or is given).
        ops: Patterns of the operators whose outputs (or inputs) are captured.
        values: Which of ``inputs`` and ``outputs``; ``outputs`` if left out.
        operands: Which inputs or outputs of operators, by their position in the signature; all
            tensors but parameters if left out.
        positions: Absolute positions in the sequence: a number, a list, or text such as ``2:8``. A
            negative one counts from the end of what a call computes. All if left out.
        rows: Rows of the batch; likewise.
        axis: The axis of positions in the values, if it is not the one after the rows.
        form: ``memory``, or ``safetensors`` files that are written as values come.
        folder: The folder of these files; a temporary one if left out, from which the result is
            written.
        max_memory: Most bytes of values in memory: what is beyond is left out, or is written to a
            file. If left out, 1 GiB and 64 MiB.
        everything: Whether to capture what is not the model's as well, such as an optimizer.

    Raises:
        ValueError: An option has none of its values, or nothing is chosen.
        ImportError: NumPy or safetensors is not installed.

    >>> tool = Capture(modules=["model.layers.*"], positions="-1")
    """

    whole = True
    by_example = True  # Rows and positions are those of one.

    def __init__(
        self,
        modules: list[str] | None = None,
        ops: list[str] | None = None,
        values: list[Literal["inputs", "outputs"]] | None = None,
        operands: list[int] | None = None,
        positions: list[int] | str | None = None,
        rows: list[int] | str | None = None,
        axis: int | None = None,
        form: Literal["memory", "safetensors"] = "memory",
        folder: Path | None = None,
        max_memory: int | None = None,
        everything: bool = False,
    ) -> None:
        chosen = ["outputs"] if values is None else list(values)
        for value in chosen:
            if value not in _VALUES:
                raise ValueError(f"values must be of inputs, outputs, not {value!r}")
        places = Places(positions, rows, axis)
        super().__init__(modules, ops, "inputs" in chosen, "outputs" in chosen, places, everything)
        if form not in ("memory", "safetensors"):
            raise ValueError(f"form must be memory or safetensors, but is {form!r}")
        if max_memory is not None and max_memory < 1:
            raise ValueError(f"max_memory must be positive, but is {max_memory}")
        need_numpy()
        self._operands = None if operands is None else frozenset(operands)
        self._held: dict[int, HostTensor] = {}
        self._bytes = 0
        self._writer: Writer | None = None
        if form == "safetensors":
            need_safetensors()
            if folder is None:
                # A result, and what reads it, refers to the tool.
                folder = record_folder(self, "capture")
            else:
                weakref.finalize(self, reserve(folder, INDEX).release)
            self._writer = Writer(folder, form, 1 << 16, max_memory or 1 << 26)
        elif folder is not None:
            raise ValueError("folder is for form='safetensors'; a result in memory has write()")
        self.max_memory = max_memory or 1 << 30
        self._values: list[CapturedValue] = []
        self._left_out: dict[str, LeftOut] = {}
        self._step = 0
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)
        self.add_inst_for_step(self.begin)

    def analyse(self, context: OpContext) -> None:
        """Capture the inputs of a chosen op."""
        if not self.is_chosen(context):
            return
        op = self.account_of(context, lambda: _Op(context, len(self._ops)))
        if not self.wants_inputs(context):
            return
        inputs = context.get_inputs() or ()
        wanted = [
            position
            for position in range(len(inputs))
            if self._is_wanted_operand(position)
            and (self._operands is not None or context.value(position) is None)
        ]
        if wanted:
            context.insert_before_op(
                self.take, observe=True, inputs=wanted, op=op, what="input", operands=wanted
            )

    def analyse_outputs(self, context: OpContext) -> None:
        """Capture the outputs of a chosen op."""
        op = self.known(context)
        if op is None or not self.wants_outputs(context):
            return
        wanted = [p for p in range(len(context.get_outputs() or ())) if self._is_wanted_operand(p)]
        if context.op_type in MODULE_VALUES:
            wanted = [0]
        if wanted:
            context.insert_after_op(
                self.take,
                observe=True,
                outputs=wanted,
                op=op,
                what=self.kind_of_output(context),
                operands=wanted,
            )

    def begin(self, step: int) -> None:
        """Note the step."""
        self._step = step

    def take(self, *values: Any, op: _Op, what: str, operands: Sequence[int]) -> None:
        """Take the values of one execution."""
        if op.context.recomputed:
            return
        with self._clock, self._lock:
            op.facts.calls += 1
            for operand, value in zip(operands, values, strict=False):
                for part, tensor in tensors_in(op.tensors, [value]):
                    self._take_one(tensor, op, what, f"{operand}{part[1:]}")

    def result(self) -> CaptureResult:
        """Return what was captured so far."""
        with self._lock:
            writer = self._writer
            if writer is not None:
                writer.flush()
            lost = [writer.lost] if writer is not None and writer.lost is not None else []
            return CaptureResult(
                [replace(op.facts) for op in self._ops.values()],
                [v for v in self._values if writer is None or v.file is not None],
                [*self._left_out.values(), *lost],
                self.notes,
                self._clock.spent / 1e9,
                self._clock.wall / 1e9,
                dict(self._held),
                writer.folder if writer is not None else None,
                list(writer.written) if writer is not None else [],
                self,
            )

    def _is_wanted_operand(self, position: int) -> bool:
        return self._operands is None or position in self._operands

    def _take_one(self, tensor: Any, op: _Op, what: str, position: str) -> None:
        span, area = self._span, None
        try:
            if not self._places.are_all and span is not None:
                rows, offsets = self._places.chosen_in(span)
                if not rows or not offsets:
                    return
            area = self._places.area(op.tensors.shape(tensor), span)
        except NotChoosableError as error:
            if not self._places.are_all:
                self._leave_out(f"positions cannot be chosen: {error}", op, 0)
                return
        try:
            values = host(op.tensors, tensor) if area is None else _chosen(op.tensors, tensor, area)
        except NotReadableError as error:
            self._leave_out(str(error), op, 0)
            return
        size = int(values.array.nbytes)
        if self._writer is None and self._bytes + size > self.max_memory:
            self._leave_out(f"more than {self.max_memory} bytes in memory", op, size)
            return
        entry = CapturedValue(
            op.number,
            self._step,
            op.facts.calls - 1,
            what,
            position,
            "",
            values.dtype,
            list(values.array.shape),
        )
        if span is not None:
            entry.outermost, entry.call = span.module, span.call
            if area is not None and span.start is not None:
                entry.rows, places = area.rows, [span.start + offset for offset in area.offsets]
                if area.by_row:
                    entry.last = places
                else:
                    entry.axis, entry.positions = area.axis, places
        self._values.append(entry)
        if self._writer is not None:
            self._writer.add(entry, values, op.facts.name)
        else:
            self._bytes += size
            self._held[id(entry)] = values

    def _leave_out(self, reason: str, op: _Op, size: int) -> None:
        left = self._left_out.setdefault(reason, LeftOut(reason, op.facts.name, self._step))
        left.tensors += 1
        left.bytes += size


class _Op:
    """One operator whose values are captured."""

    def __init__(self, context: OpContext, number: int) -> None:
        self.context, self.number = context, number
        self.tensors = facts_of(context)
        self.facts = CapturedOp.of(context)


def _chosen(facts: Facts, tensor: Any, area: Area) -> HostTensor:
    """Return a copy of the chosen part of a tensor, with an axis for rows and one for positions, or
    only for rows if each has one position.
    """
    shape, rows, offsets = area.shape, area.rows, area.offsets
    if not area.is_all and not area.by_row and facts.shape(tensor) == shape:
        # What is not chosen is not copied from its device.
        cut = [slice(None)] * (area.axis + 1)
        cut[0] = slice(rows[0], rows[-1] + 1)
        cut[area.axis] = slice(offsets[0], offsets[-1] + 1)
        tensor = tensor[tuple(cut)]
        shape = tuple(facts.shape(tensor) or ())  # type: ignore[arg-type]  # As of its whole.
        rows = [row - area.rows[0] for row in rows]
        offsets = [offset - area.offsets[0] for offset in offsets]
    values = host(facts, tensor)
    array = values.array.reshape(shape)
    if area.by_row:
        import numpy

        return HostTensor(numpy.moveaxis(array, area.axis, 1)[rows, offsets], values.dtype)
    if not area.is_all:
        # One axis after the other; the copy does not hold what is not chosen.
        array = array[rows].take(offsets, axis=area.axis)
    return HostTensor(array, values.dtype)
