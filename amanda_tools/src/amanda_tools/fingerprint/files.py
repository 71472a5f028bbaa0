"""The files of a fingerprint: a table of operators and types, and rows that are only appended.

Owns their format. Rows go to the disk in blocks, each with its length and a digest, so that what a
process wrote before it was killed can be read. The reader trusts nothing in the files.

``ops.jsonl`` has one JSON object in each line: the format, an operator, a type of tensors, or the
end of the run. ``rows.bin`` has blocks of rows (`ROW`), which refer to operators and types by their
numbers. A line is on the disk before the first row that refers to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda_core.errors import ResultError
from amanda_core.results.records import record_beside
from amanda_core.runtime.bounded import Unreadable, read
from amanda_tools.kit.operators.entries import EitherWayOp
from amanda_tools.kit.output.folders import create_folder

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ARGUMENTS",
    "CONSTANT",
    "GRADIENT",
    "HANDLE",
    "INPUT",
    "KEPT",
    "LAST_ITEM",
    "LAST_POSITION",
    "NOBODY",
    "NONE",
    "NO_ITEM",
    "OPS",
    "OUTPUT",
    "REUSED",
    "ROWS",
    "SKETCH",
    "STATE",
    "UNREADABLE",
    "UNSEEN_WRITER",
    "UNWRITTEN",
    "Fingerprinted",
    "Stream",
    "contiguous",
    "digest_of",
    "load_fingerprint",
    "row_dtype",
]

FORMAT = "amanda.fingerprint/1"
OPS, ROWS = "ops.jsonl", "rows.bin"

#: What a row is of: the begin or end of an execution without tensors (its position says which of
#: `INPUT` and `OUTPUT`), a tensor that an operator read or wrote, or the
#: state of a random generator at the beginning of a step. Those of `replicas` may also be of the
#: arguments of an execution that are not tensors, of the gradient of a weight, or of two linear
#: functions of such a gradient, which are where norms are otherwise.
NONE, INPUT, OUTPUT, STATE, ARGUMENTS, GRADIENT, SKETCH = range(7)
#: Flags of a row: the memory has not been written yet; it has no digest; its digest differs from
#: the one that was made when an operator wrote it, although no write was counted; it was not read
#: again, since no write was counted; it is a handle, such as that of a variable, without values;
#: with norms, all of its elements are equal; the tensor is known from an earlier step.
UNWRITTEN, UNREADABLE, UNSEEN_WRITER, REUSED, HANDLE, CONSTANT, KEPT = (1 << n for n in range(7))
#: No operator made the input, or the position has no items.
NOBODY, NO_ITEM = 0xFFFFFFFF, 0xFFFF
#: Further positions, and further items, share a number.
LAST_POSITION, LAST_ITEM = 0xFFFF, NO_ITEM - 1

#: order, op, step, execution, producer, type, position, item, what, flags, thread, digest, norm,
#: largest magnitude.
ROW = struct.Struct("<IIIIIIHHBBHQff")
#: Length in bytes and digest of a block.
_BLOCK = struct.Struct("<IQ")
_FIELDS = (
    *((name, "<u4") for name in ("order", "op", "step", "execution", "producer", "type")),
    *(("position", "<u2"), ("item", "<u2"), ("what", "u1"), ("flags", "u1"), ("thread", "<u2")),
    *(("digest", "<u8"), ("norm", "<f4"), ("largest", "<f4")),
)
#: Bytes of rows after which a block is written.
_ENOUGH = 1 << 16
#: Size of the largest file that a reader accepts.
_LARGEST = 1 << 34


def row_dtype() -> np.dtype[Any]:
    """Return the dtype of a row; its fields are those of the format."""
    import numpy

    return numpy.dtype(list(_FIELDS))


def digest_of(data: Any) -> int:
    """Return the digest of an object with the buffer protocol: XXH3 with 64 bits."""
    import xxhash

    return int(xxhash.xxh3_64_intdigest(data))


def contiguous(values: Any) -> Any:
    """Return what `Facts.buffer` returns as an object with the buffer protocol, in C order."""
    if isinstance(values, (bytes, memoryview)):
        return values
    import numpy

    return numpy.ascontiguousarray(values)


class Stream:
    """Appends operators, types and rows to the files of a fingerprint.

    Args:
        folder: The folder, which must not have these files yet.

    Raises:
        ValueError: It has them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = create_folder(folder)
        try:
            self._ops = (folder / OPS).open("x", encoding="utf-8")
            self._rows = (folder / ROWS).open("xb")
        except FileExistsError:
            raise ValueError(
                f"folder must have no fingerprint yet, but {str(folder)!r} has one"
            ) from None
        #: Rows that are not written yet; a driver's recorder appends to them, too.
        self.pending = bytearray()
        self._written = 0
        #: A fork has the open files, too, and must not write to them.
        self._process = os.getpid()
        self.lost = 0
        self.problem = ""
        self._line({"format": FORMAT})

    def add_op(
        self, op: EitherWayOp, names: list[str], weights: list[tuple[int, int, str]] | None = None
    ) -> None:
        """Append an operator; its number is the count of operators before it.

        Args:
            op: The operator.
            names: Names of its inputs.
            weights: The position, the item and the name of each weight that it reads, if known.
        """
        self._line({"op": asdict(op), "inputs": names} | ({"weights": weights} if weights else {}))

    def say(self, **facts: Any) -> None:
        """Append facts about the run."""
        self._line({"about": facts})

    def add_type(self, dtype: str, shape: list[int | None] | None, placement: str) -> None:
        """Append a type of tensors; its number is the count of types before it."""
        self._line({"type": dtype, "shape": shape, "placement": placement})

    def add_row(self, *values: int | float) -> None:
        """Append a row; `row_dtype` names the values."""
        self.pending += ROW.pack(*values)
        if len(self.pending) >= _ENOUGH:
            self.flush()

    @property
    def count(self) -> int:
        """Return the number of rows so far."""
        return self._written + len(self.pending) // ROW.size

    def flush(self) -> None:
        """Write the rows that are pending. A full disk is a problem of the result, not an error."""
        block = bytes(self.pending)
        del self.pending[: len(block)]  # Others may have been appended.
        self._written += len(block) // ROW.size
        if not block or os.getpid() != self._process:
            return
        if self.problem:
            self.lost += len(block) // ROW.size
            return
        try:
            self._rows.write(_BLOCK.pack(len(block), digest_of(block)))
            self._rows.write(block)
            self._rows.flush()
        except OSError as error:
            self.problem = f"could not be written: {error.strerror or error}"
            self.lost += len(block) // ROW.size

    def end(self, notes: list[str]) -> None:
        """Write what is pending, and that the run has ended so far."""
        self.flush()
        self._line({"end": self.count - self.lost, "notes": notes})

    def close(self) -> None:
        """Write what is pending, and close the files."""
        self.flush()
        for file in (self._ops, self._rows):
            with contextlib.suppress(OSError):  # The disk is full, which the result says.
                file.close()

    def _line(self, content: dict[str, Any]) -> None:
        if os.getpid() != self._process:
            return
        try:
            self._ops.write(json.dumps(content, separators=(",", ":")) + "\n")
            self._ops.flush()
        except OSError as error:
            self.problem = self.problem or f"could not be written: {error.strerror or error}"


@dataclass
class Fingerprinted:
    """The fingerprint of one process.

    Attributes:
        folder: Where its files are.
        ops: The operators, forward and backward, in the order of their first execution.
        inputs: Names of the inputs of each operator.
        weights: The names of the weights that each operator reads, by position and item, if they
            were recorded.
        about: Facts about the run.
        types: Dtype, shape and placement of the tensors, as text.
        rows: The rows, a structured array of `row_dtype`.
        end: How many rows there were when the run ended; None if it broke off.
        damage: What could not be read, in a few words; an empty string if nothing.
        notes: What was not seen.
    """

    folder: Path
    ops: list[EitherWayOp] = field(default_factory=list)
    inputs: list[list[str]] = field(default_factory=list)
    weights: list[dict[tuple[int, int], str]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    types: list[str] = field(default_factory=list)
    rows: Any = None
    end: int | None = None
    damage: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def level(self) -> str:
        """Return what has a digest: ``operators``, ``modules`` or ``steps``."""
        return str(self.about.get("level", "operators"))

    @property
    def window(self) -> str:
        """Return the steps and ranks to which the record was restricted, in a few words."""
        chosen = ((name, self.about.get(name)) for name in ("steps", "ranks"))
        return " and ".join(f"{name} {_ranges(numbers)}" for name, numbers in chosen if numbers)

    @property
    def ended(self) -> bool:
        """Return True if the run ended, and did not break off, and everything can be read."""
        return self.end == len(self.rows) and not self.damage

    def place_of(self, row: Any) -> str:
        """Return what a row is of, such as ``input 1 (weight) of op '3/linear'``."""
        op = self.ops[row["op"]]
        if self.level == "steps" and row["what"] != STATE:
            return "the values of all operators"
        if self.level == "modules" and row["what"] != STATE:
            kind = "gradients" if op.phase == "backward" else "values"
            how = "read from elsewhere" if row["what"] == INPUT else "wrote"
            where = f"of module {op.name!r}" if op.module else op.name
            return f"{kind} that the operators {where} {how}"
        if row["what"] == STATE:
            return f"the state of the random generator {op.name!r}"
        if row["what"] in (GRADIENT, SKETCH):
            return f"the gradient of weight {op.name!r}"
        backward = op.phase == "backward"
        what = "an execution"
        if row["what"] != NONE:
            kind = "input" if row["what"] == INPUT else "output"
            what = {"input": "gradient in", "output": "gradient out"}[kind] if backward else kind
            what += f" {row['position']}"
            what += "" if row["item"] == NO_ITEM else f".{row['item']}"
            names = self.inputs[row["op"]]
            if kind == "input" and row["position"] < len(names):
                what += f" ({names[row['position']]})"
        return f"{what} of {op.phase + ' ' if backward else ''}op {op.name!r}"


def _ranges(numbers: list[int]) -> str:
    """Return numbers in rising order as text.

    >>> _ranges([0, 3, 4, 5])
    '0, 3 to 5'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in parts)


def place_of(folder: Path, tool: str = "fingerprint") -> Path | None:
    """Return the folder that has a fingerprint: this one, or one of results in it; None if none.

    Of a process that was killed it is the one in which it was recording.
    """
    places = folder, folder / tool, record_beside(folder, tool)
    return next((one for one in places if one is not None and (one / OPS).exists()), None)


def load_fingerprint(path: Path | str) -> Fingerprinted:
    """Read the fingerprint of one process.

    Args:
        path: Folder of its files, or of the results of a run of the tool under its default name,
            which may have been killed.

    Raises:
        ResultError: There is none, or its files are malformed. Files that merely end too early are
            read up to there.
        ImportError: NumPy is not installed.
    """
    folder = Path(path)
    folder = place_of(folder) or folder
    found = Fingerprinted(folder)
    _read_lines(found)
    _read_rows(found)
    if ".recording-" in folder.name:
        found.end = None  # Its process was killed. Results of others are copied from there.
    return found


def _malformed(folder: Path, why: str) -> ResultError:
    return ResultError(
        f"This is not a fingerprint: {why}", where=str(folder), fix="Record the run again"
    )


def _read(folder: Path, name: str) -> bytes:
    try:
        return read(folder / name, _LARGEST)
    except Unreadable as error:
        raise _malformed(folder, f"{name}: {error}") from None


def _read_lines(found: Fingerprinted) -> None:
    """Read the operators and types, up to a line that is cut off."""
    lines = _read(found.folder, OPS).split(b"\n")
    if lines.pop():
        found.damage = f"{OPS} ends within a line"
    for number, line in enumerate(lines):
        try:
            content = json.loads(line)
            if number == 0 and content["format"] != FORMAT:
                raise _malformed(found.folder, f"its format is not {FORMAT!r}")
            _add(found, content)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            if isinstance(error, ResultError):
                raise
            why = f"line {number + 1} of {OPS} is malformed"
            raise _malformed(found.folder, why) from None
    if not lines:
        raise _malformed(found.folder, f"{OPS} is empty")


def _add(found: Fingerprinted, content: dict[str, Any]) -> None:
    if "op" in content:
        values = content["op"]
        known = {name: values[name] for name in EitherWayOp.__dataclass_fields__}
        for name, value in known.items():
            if not isinstance(value, int if name == "id" else (str, type(None))):
                raise TypeError(name)
        found.ops.append(EitherWayOp(**known))
        found.inputs.append([str(name) for name in content["inputs"]])
        weights = content.get("weights", ())
        found.weights.append({(int(at), int(item)): str(name) for at, item, name in weights})
    elif "about" in content:
        found.about |= dict(content["about"])
    elif "type" in content:
        shape = content["shape"]
        axes = "..." if shape is None else ",".join("?" if n is None else str(n) for n in shape)
        found.types.append(f"{content['type']}[{axes}]{content['placement']}")
    elif "end" in content:
        found.end, found.notes = int(content["end"]), [str(note) for note in content["notes"]]


def _read_rows(found: Fingerprinted) -> None:
    """Read the rows, up to a block that is cut off or damaged."""
    import numpy

    content, at, blocks = memoryview(_read(found.folder, ROWS)), 0, []
    while at < len(content):
        start = at + _BLOCK.size
        size, digest = _BLOCK.unpack(content[at:start]) if start <= len(content) else (0, 0)
        block = content[start : start + size]
        if not size or size % ROW.size or len(block) < size or digest_of(block) != digest:
            cut = start + size > len(content)
            found.damage = f"{ROWS} {'ends within a' if cut else 'has a damaged'} block"
            break
        blocks.append(block)
        at = start + size
    found.rows = numpy.frombuffer(b"".join(blocks), row_dtype())
    for name, count in (("op", len(found.ops)), ("type", len(found.types))):
        wrong = found.rows[name] >= count
        if name == "type":
            wrong &= found.level == "operators"
            wrong &= (found.rows["what"] == INPUT) | (found.rows["what"] == OUTPUT)
        if wrong.any():
            # The lines that these rows refer to are cut off.
            found.rows = found.rows[: int(numpy.argmax(wrong))]
            found.damage = found.damage or f"{OPS} lacks lines"
    if found.level != "operators":
        _keep_last_rows(found)
        return
    order = found.rows["order"]
    if (order[1:] < order[:-1]).any():
        # A thread read a large tensor while another one recorded.
        found.rows = found.rows[numpy.argsort(order, kind="stable")]


def _keep_last_rows(found: Fingerprinted) -> None:
    """Keep the last row of each visit of a module, which was written several times, in order."""
    import numpy

    rows = found.rows[::-1]
    # The first of equal keys is kept, which was written last.
    keys = numpy.ascontiguousarray(rows[["order", "op", "what", "position"]])
    _, places = numpy.unique(keys, return_index=True)
    if found.end is not None:
        found.end -= len(rows) - len(places)
    found.rows = rows[places]
