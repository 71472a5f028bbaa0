"""The result of `capture`: the values, their positions in the sequence, and whole sequences.

Owns the index, how values are read, and how those of several calls are put together.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from amanda_core.engine.calls import MODULE_VALUES
from amanda_core.errors import OutputError, ResultError
from amanda_core.results import Table, tables as results
from amanda_tools.dump.files import Dumped, Writer, problems_of
from amanda_tools.dump.index import DumpedTensor, DumpIndex, LeftOut
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output.extras import need_safetensors
from amanda_tools.kit.output.folders import create_folder, whole_file, write_text
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    format_quantity,
    render_json,
)
from amanda_tools.kit.tensors.types import TensorType
from amanda_tools.kit.tensors.values import HostTensor, numbers

__all__ = [
    "INDEX",
    "CaptureResult",
    "CapturedOp",
    "CapturedSequence",
    "CapturedValue",
    "load_capture",
]

FORMAT = "amanda.capture/1"
#: Name of the index in the folder of captured values.
INDEX = "index.json"
_FILE = re.compile(r"\d{5}\.safetensors")


@dataclass
class CapturedOp(OpFacts):
    """One operator whose values were captured.

    Attributes:
        calls: How often it ran while it was watched.
    """

    calls: int = 0


@dataclass
class CapturedValue(DumpedTensor):
    """One captured value, an array.

    Attributes:
        outermost: Name of the outermost module that ran; empty outside of any.
        call: Number of its call in the step, from 0; None outside of any.
        rows: The rows of the batch that it holds, along axis 0; None if these are not known.
        positions: The absolute positions that it holds, along `axis`; None likewise.
        axis: The axis of positions.
        last: The absolute position of each row, if each has one of its own; there is no axis of
            positions then.
    """

    outermost: str = ""
    call: int | None = None
    rows: list[int] | None = None
    positions: list[int] | None = None
    axis: int | None = None
    last: list[int] | None = None


class CapturedSequence(NamedTuple):
    """Values of several calls, put together.

    Attributes:
        positions: The absolute positions in the sequence, along axis 1.
        array: The values: rows, positions, and what else there is.
    """

    positions: list[int]
    array: Any


@dataclass
class CaptureResult(Tabular):
    """The captured values.

    Attributes:
        ops: The operators; a module's values are those of operators called ``module_input`` and
            ``module_output``.
        values: The values, in the order in which they came.
        left_out: What could not be captured, or was more than there was room for.
        notes: Where the tool is not supported, and patterns that chose nothing.
        tool_seconds: Time that capturing took.
        wall_seconds: Time from the first operator to the last.
    """

    records = "values", CapturedValue

    ops: list[CapturedOp] = field(default_factory=list)
    values: list[CapturedValue] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    _held: dict[int, HostTensor] = field(default_factory=dict, repr=False)
    _folder: Path | None = field(default=None, repr=False)
    _files: list[str] = field(default_factory=list, repr=False)
    #: Whose temporary folder it is.
    _owner: Any = field(default=None, repr=False)

    def read(self, value: CapturedValue) -> Any:
        """Return a value as a NumPy array; ``bfloat16`` and the like as ``float32``.

        Raises:
            ResultError: Its file cannot be read.
        """
        held = self._held.get(id(value))
        if held is None:
            if self._folder is None:
                raise ResultError("The value is not of this result", fix="Read one of its values")
            held = Dumped(DumpIndex(), self._folder, self._owner).read(value)
        return numbers(held.array, held.dtype)

    def of(self, name: str, what: str = "output", operand: int = 0) -> list[CapturedValue]:
        """Return the values of one operator or module.

        Args:
            name: Readable name of the operator, or path of the module.
            what: ``input`` or ``output``.
            operand: Which input or output of an operator.
        """
        chosen = {
            number
            for number, op in enumerate(self.ops)
            if op.name == name or (op.type in MODULE_VALUES and op.module == name)
        }
        position = str(operand)
        return [
            value
            for value in self.values
            if value.op in chosen and value.what == what and value.position == position
        ]

    def sequence(
        self,
        name: str,
        what: str = "output",
        operand: int = 0,
        step: int = 0,
        along: Sequence[Sequence[int]] | None = None,
        outermost: str | None = None,
    ) -> CapturedSequence:
        """Return the values of one operator or module over all calls of a step.

        What a later call computes again replaces what an earlier one has computed, as where a draft
        of assisted decoding was rejected.

        Args:
            name: Readable name of the operator, or path of the module.
            what: ``input`` or ``output``.
            operand: Which input or output of an operator.
            step: Number of the step.
            along: For each row of the result, the row that it was in at each call, from call 0 on,
                as beam search moves rows (``beam_indices`` of transformers' ``generate``). If left
                out, each row stays where it is.
            outermost: Name of the outermost module, if several have run it, such as a model and
                its assistant.

        Raises:
            ResultError: There are no such values, they have no positions, or their rows differ.
        """
        import numpy

        values = [value for value in self.of(name, what, operand) if value.step == step]
        if not values:
            known = ", ".join(op.name for op in self.ops[:4])
            raise ResultError(
                f"No {what} of {name!r} was captured in step {step}",
                fix=f"Name one of: {known}" if known else "Choose others",
            )
        models = list(dict.fromkeys(value.outermost for value in values))
        if outermost is not None:
            values = [value for value in values if value.outermost == outermost]
        if not values or (outermost is None and len(models) > 1):
            raise ResultError(
                f"The {what} of {name!r} was captured in calls of {', '.join(models)}",
                fix=f"Choose one of them: outermost={models[0]!r}",
            )
        columns: dict[int, Any] = {}
        for value in values:
            if value.rows is None or value.positions is None or value.axis is None:
                raise ResultError(
                    f"The {what} of {name!r} has no positions: its shape is {value.shape}",
                    fix="Read the values one by one, or capture with axis=...",
                )
            if along is None:
                rows = values[0].rows or []
                if value.rows != rows:
                    raise _other_rows(name, value)
                index = list(range(len(rows)))
            else:
                index = _rows_along(along, value, name)
            array = numpy.moveaxis(self.read(value), value.axis, 1)[index]
            for place, position in enumerate(value.positions):
                columns[position] = array[:, place]
        positions = sorted(columns)
        return CapturedSequence(positions, numpy.stack([columns[p] for p in positions], axis=1))

    @property
    def title(self) -> str:
        """A summary of the captured values in one line."""
        ops = format_count(len(self.ops), "operator")
        text = f"{format_count(len(self.values), 'value')} of {ops}"
        for left in self.left_out:
            size = f", {format_quantity(left.bytes, 'B')}" if left.bytes else ""
            text += f"; left out: {left.tensors} ({left.reason}{size}; first {left.first})"
        parts = [
            text,
            *describe_overhead("capturing", self.tool_seconds, self.wall_seconds),
            *self.notes,
        ]
        return "; ".join(parts)

    def table(self) -> Table:
        """Return one row for each operator and kind of value."""
        rows: dict[tuple[int, str, str], list[Any]] = {}
        for value in self.values:
            op = self.ops[value.op]
            shape = str(TensorType(value.dtype, tuple(value.shape)))
            row = rows.setdefault(
                (value.op, value.what, value.position),
                [op.name, f"{value.what} {value.position}", shape, 0, 0],
            )
            row[3] += 1
            row[4] += len(value.rows or ()) * len(value.positions or ()) + len(value.last or ())
        columns = ("op", "value", "first", "times", "positions")
        return Table(self.title, columns, [tuple(row) for row in rows.values()])

    @property
    def problems(self) -> list[str]:
        """Return what is lost although it was requested and within the limits."""
        return problems_of(self.left_out)

    def to_json(self) -> str:
        """Return the index; the values are in the files that it names."""
        parts = {
            "format": FORMAT,
            "merge": {"values": []},
            "ops": self.ops,
            "values": [
                {key: part for key, part in fields_of(value).items() if key != "statistics"}
                for value in self.values
            ],
            "left_out": self.left_out,
            "notes": self.notes,
            "tool_seconds": self.tool_seconds,
            "wall_seconds": self.wall_seconds,
        }
        return render_json(parts)

    def write(self, folder: Path | str) -> list[Path]:
        """Write the values and their index into a folder.

        Returns:
            The files.

        Raises:
            ImportError: safetensors is not installed.
        """
        folder = create_folder(folder)
        names = list(self._files)
        if self._held:
            need_safetensors()
            writer = Writer(folder, "safetensors", len(self.values))
            for value in self.values:
                held = self._held.get(id(value))
                if held is not None:
                    writer.add(value, held, self.ops[value.op].name)
            writer.flush()
            if writer.lost is not None:
                raise OutputError(*problems_of([writer.lost]), where=str(folder))
            names = writer.written
        elif self._folder is not None and folder != self._folder:
            for name in names:
                with whole_file(folder / name) as new:
                    shutil.copyfile(self._folder / name, new)
        write_text(folder / INDEX, self.to_json())
        return [folder / name for name in (*names, INDEX)]


def load_capture(path: Path | str) -> CaptureResult:
    """Read what was captured.

    Args:
        path: The folder that a result was written to, or the one that `amanda run` wrote.

    Raises:
        ResultError: There is none, or its index is malformed.
    """
    folder = Path(path)
    inside = folder / "capture"
    if not (folder / INDEX).exists() and (inside / INDEX).exists():
        folder = inside
    read = results.load(folder / INDEX)
    try:
        if read["format"] != FORMAT:
            raise ValueError(f"its format is {str(read['format'])[:40]!r}, not {FORMAT!r}")
        values = [CapturedValue(**value) for value in read["values"]]
        found = CaptureResult(
            [CapturedOp(**op) for op in read["ops"]],
            values,
            [LeftOut(**left) for left in read["left_out"]],
            [str(note) for note in read["notes"]],
            float(read["tool_seconds"]),
            float(read["wall_seconds"]),
            _folder=folder,
        )
        for value in values:
            if value.file is None or _FILE.fullmatch(value.file) is None:
                raise ValueError(f"{str(value.file)[:40]!r} is not the name of a file of values")
            if value.op not in range(len(found.ops)):
                raise ValueError(f"there is no operator {value.op!r}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ResultError(
            f"Not the index of a capture: {error}"[:300], where=str(folder), fix="Write it again"
        ) from error
    found._files = sorted({value.file for value in values if value.file is not None})
    return found


def _rows_along(along: Sequence[Sequence[int]], value: CapturedValue, name: str) -> list[int]:
    index = []
    for path in along:
        call = value.call or 0
        # A row that has ended stays where it was.
        row = int(path[min(call, len(path) - 1)])
        if row not in (value.rows or ()):
            raise _other_rows(name, value)
        index.append((value.rows or []).index(row))
    return index


def _other_rows(name: str, value: CapturedValue) -> ResultError:
    return ResultError(
        f"Call {value.call} captured the rows {value.rows} of {name!r}, not those asked for",
        fix="Capture all rows; give `along` where rows move, as in beam search",
    )
