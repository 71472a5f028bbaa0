"""`Dump`: write what goes into and comes out of operators to files.

Decides which tensors are taken and when. `files` writes them and `index` describes them. A
little over 400 lines: one class.
"""

from __future__ import annotations

import shutil
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from amanda_core import OpContext
from amanda_core.results import Table
from amanda_core.results.records import record_folder
from amanda_tools.dump.arguments import encoded
from amanda_tools.dump.files import Dumped, Form, Writer, problems_of, reserve
from amanda_tools.dump.index import (
    INDEX,
    DumpedArguments,
    DumpedOp,
    DumpedTensor,
    DumpIndex,
    LeftOut,
)
from amanda_tools.kit.operators.tool import OperatorTool
from amanda_tools.kit.operators.weights import WeightKeys
from amanda_tools.kit.output.extras import need_safetensors
from amanda_tools.kit.output.folders import create_folder, whole_file, write_text
from amanda_tools.kit.output.rendering import (
    dataframe,
    describe_overhead,
    format_count,
    format_quantity,
    render_html,
)
from amanda_tools.kit.tensors.statistics import statistics_of
from amanda_tools.kit.tensors.types import TensorType, describe_tensors, is_floating
from amanda_tools.kit.tensors.values import (
    HostTensor,
    NotReadableError,
    facts_of,
    host,
    need_numpy,
    tensors_in,
)

__all__ = ["Dump", "DumpResult"]

_Kept = tuple[DumpedTensor, HostTensor, str]
Values = Literal["inputs", "weights", "outputs", "gradients"]
_VALUES = ("inputs", "weights", "outputs", "gradients")


@dataclass
class DumpResult:
    """Result of a dump.

    Attributes:
        index: Description of the contents.
        folder: Folder of the files. Unless the tool was given one, it is temporary and is removed
            with the tool.
        files: Names of the files in that folder.
    """

    index: DumpIndex
    folder: Path
    files: list[str] = field(default_factory=list)
    _keeps: bool = field(default=True, repr=False)
    #: The tool, kept alive as long as its temporary folder is needed.
    _owner: Any = field(default=None, repr=False)

    def open(self) -> Dumped:
        """Return the dump, to read tensors from."""
        return Dumped(self.index, self.folder, self._owner)

    def table(self) -> Table:
        """Return a table with one row for each operator and kind of tensor."""
        rows: dict[tuple[int, str, str], list[Any]] = {}
        for tensor in self.index.tensors:
            op = self.index.ops[tensor.op]
            key = (tensor.op, tensor.what, tensor.position)
            shape = str(TensorType(tensor.dtype, tuple(tensor.shape)))
            row = rows.setdefault(
                key, [op.name, f"{tensor.what} {tensor.position}", shape, 0, op.source or ""]
            )
            row[3] += 1
        columns = ("op", "tensor", "shape", "times", "source")
        return Table(self.title, columns, [tuple(row) for row in rows.values()])

    @property
    def title(self) -> str:
        """Return a summary in one line."""
        index = self.index
        ops = format_count(len(index.ops), "operator")
        text = f"{format_count(len(index.tensors), 'tensor')} of {ops}"
        for left in index.left_out:
            size = f", {format_quantity(left.bytes, 'B')}" if left.bytes else ""
            text += f"; left out: {left.tensors or 'all'} ({left.reason}{size})"
        return "; ".join(
            [text, *describe_overhead("dumping", index.tool_seconds, index.wall_seconds)]
        )

    @property
    def problems(self) -> list[str]:
        """Return what is lost although it was requested and within the limits."""
        return problems_of(self.index.left_out)

    def to_json(self) -> str:
        """Return the index as JSON."""
        return self.index.to_json()

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row for each tensor; needs pandas."""
        return dataframe(DumpedTensor, self.index.tensors)

    def _repr_html_(self) -> str:
        return render_html([self.table()])

    def write(self, folder: Path | str) -> list[Path]:
        """Write the index and copy the files into a folder.

        Does nothing if the tool was given another folder, which has everything already.

        Returns:
            The files in `folder`.
        """
        folder = Path(folder)
        if self._keeps and folder != self.folder:
            return []
        create_folder(folder)
        if folder != self.folder:
            for name in self.files:
                with whole_file(folder / name) as new:
                    shutil.copyfile(self.folder / name, new)
        write_text(folder / INDEX, self.to_json())
        return [folder / name for name in (*self.files, INDEX)]


class Dump(OperatorTool["_Op"]):
    """Writes inputs, weights, outputs and gradients of operators to files.

    Args:
        values: Any of ``inputs``, ``weights``, ``outputs`` and ``gradients``; the default is
            ``outputs``. Weights are the inputs that the model learns; ``inputs`` does not include
            them.
        form: Format of the files: ``npz`` or ``safetensors``.
        stats: Write statistics into the index instead of values into files.
        bins: Number of bins of the histograms in the statistics.
        steps: Numbers of the steps to dump; the default is all.
        first: Dump only this many executions of each operator; the default is all.
        last: Keep this many last steps in memory, and write only these at the end. 0 writes
            everything at once.
        folder: Folder to write to. By default a temporary one, from which the result is written.
        max_bytes: Maximum number of bytes to write or keep.
        max_files: Maximum number of files.
        everything: Include operators outside the model, such as those of an optimizer.
        calls: Also dump inputs, weights, outputs and the arguments that are not tensors, so that
            ``amanda replay`` can execute an operator again.

    Raises:
        ValueError: An option has an invalid value, or the folder contains a dump already or is
            written to by another run.
        ImportError: NumPy or safetensors is not installed.

    >>> tool = Dump(values=["inputs", "outputs"], first=1)
    """

    def __init__(
        self,
        values: list[Values] | None = None,
        form: Form = "npz",
        stats: bool = False,
        bins: int = 16,
        steps: list[int] | None = None,
        first: int | None = None,
        last: int = 0,
        folder: Path | None = None,
        max_bytes: int = 1 << 32,
        max_files: int = 1000,
        everything: bool = False,
        calls: bool = False,
    ) -> None:
        super().__init__(everything)
        chosen: list[str] = ["outputs"] if values is None else list(values)
        chosen += ["inputs", "weights", "outputs"] if calls else []
        if calls and stats:
            raise ValueError("calls needs values: leave out stats")
        for value in chosen:
            if value not in _VALUES:
                raise ValueError(f"values must be of {', '.join(_VALUES)}, not {value!r}")
        if form not in ("npz", "safetensors"):
            raise ValueError(f"form must be npz or safetensors, but is {form!r}")
        for name, number in (
            ("bins", bins),
            ("first", first),
            ("last", last),
            ("max_bytes", max_bytes),
            ("max_files", max_files),
        ):
            if number is not None and number < 0:
                raise ValueError(f"{name} must not be negative, but is {number}")
        need_numpy()
        if form == "safetensors":
            need_safetensors()
        self.values = frozenset(chosen)
        self.stats = stats
        self.bins = bins
        self.steps = None if steps is None else frozenset(steps)
        self.first = first
        self.max_bytes = max_bytes
        self._keeps = folder is not None
        if folder is not None:
            folder = Path(folder)
            lock = reserve(folder, INDEX)
            weakref.finalize(self, lock.release)
        else:
            folder = record_folder(self, "dump")  # Results keep the tool alive.
        self._writer = Writer(folder, form, max_files)
        self._tensors: list[DumpedTensor] = []
        self._left_out: dict[str, LeftOut] = {}
        self._calls = calls
        self._arguments: list[DumpedArguments] = []
        #: Tensors of the last steps, the newest step last.
        self._kept: deque[list[_Kept]] | None = deque(maxlen=last) if last else None
        self._bytes = 0
        self._step, self._takes = 0, self.steps is None or 0 in self.steps
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)
        self.add_inst_for_step(self.begin)
        if self._keeps:
            # Write the index even if an exception ends the program.
            weakref.finalize(self, _write_at_end, weakref.ref(self))

    def analyse(self, context: OpContext) -> None:
        """Insert routines that dump the inputs of an operator and their gradients."""
        if not self.is_wanted(context):
            return
        op = self.account_of(context, lambda: _Op(context, len(self._ops)))
        op.weights.follow(context)
        wanted = []
        for position, value in enumerate(context.get_inputs() or ()):
            read = op.weights.consumed and op.weights.at(position) is not None
            what = "weight" if read or _is_learned(context, position) else "input"
            if f"{what}s" in self.values:
                wanted.append((position, what))
            if "gradients" in self.values and is_floating(op.tensors, value):
                # One by one: requested together, all of them would be computed.
                context.insert_after_backward_op(
                    self.take,
                    observe=True,
                    grad_inputs=[position],
                    op=op,
                    wanted=[(position, "grad_input")],
                )
        if self._calls:
            # Attributes are those of the first execution.
            op.attributes = {
                name: encoded(value, op.tensors, "") for name, value in context.attrs.items()
            }
            context.insert_before_op(self.note_call, observe=True, op=op)
        context.insert_before_op(
            self.enter, observe=True, inputs=[p for p, _ in wanted], op=op, wanted=wanted
        )
        if "gradients" in self.values and not context.supports("late_gradients"):
            context.insert_before_backward_op(self.take_all, observe=True, op=op)

    def analyse_outputs(self, context: OpContext) -> None:
        """Insert routines that dump the outputs of an operator and the gradients arriving there."""
        op = self.known(context)
        if op is None:
            return
        outputs = context.get_outputs() or ()
        if "outputs" in self.values:
            wanted = [(position, "output") for position in range(len(outputs))]
            context.insert_after_op(self.leave, observe=True, op=op, wanted=wanted)
        if "gradients" in self.values and context.supports("late_gradients"):
            for position, value in enumerate(outputs):
                if is_floating(op.tensors, value):
                    context.insert_before_backward_op(
                        self.take,
                        observe=True,
                        grad_outputs=[position],
                        op=op,
                        wanted=[(position, "grad_output")],
                    )

    def begin(self, step: int) -> None:
        """Record the number of the step, and whether it is dumped."""
        # With the clock, whose time then includes the steps that are not dumped.
        with self._clock, self._lock:
            self._step = step
            self._takes = self.steps is None or step in self.steps

    def note_call(self, *inputs: Any, op: _Op) -> None:
        """Record the arguments of one execution, if they are not those of the one before."""
        with self._clock, self._lock:
            if not self._takes or (self.first is not None and op.facts.calls >= self.first):
                return
            names = [*op.names, *(f"arg{n}" for n in range(len(op.names), len(inputs)))]
            values = {
                name: encoded(value, op.tensors, str(position))
                for position, (name, value) in enumerate(zip(names, inputs, strict=False))
            } | op.attributes
            if values != op.arguments:
                op.arguments = values
                self._arguments.append(DumpedArguments(op.number, op.facts.calls, values))

    def enter(self, *inputs: Any, op: _Op, wanted: Sequence[tuple[int, str]]) -> None:
        """Dump the inputs of one execution and count it."""
        if not self._takes:
            with self._lock:
                op.facts.calls += 1
            return
        with self._clock, self._lock:
            op.facts.calls += 1
            self._take(inputs, op, wanted, op.facts.calls - 1)

    def leave(self, *outputs: Any, op: _Op, wanted: Sequence[tuple[int, str]]) -> None:
        """Dump the outputs of one execution."""
        if not self._takes:
            return
        with self._clock, self._lock:
            self._take(outputs, op, wanted, op.facts.calls - 1)

    def take(self, gradient: Any, op: _Op, wanted: Sequence[tuple[int, str]]) -> None:
        """Dump a gradient."""
        with self._clock, self._lock:
            (kind,) = wanted
            number = op.gradients.get(kind, 0)
            op.gradients[kind] = number + 1
            self._take([gradient], op, wanted, number)

    def take_all(self, *gradients: Any, op: _Op) -> None:
        """Dump the gradients of all outputs, where they arrive together."""
        for position, gradient in enumerate(gradients):
            if is_floating(op.tensors, gradient):
                self.take(gradient, op, [(position, "grad_output")])

    def result(self) -> DumpResult:
        """Return what has been dumped so far."""
        with self._lock:
            for step in self._kept or ():
                for tensor, values, name in step:
                    self._tensors.append(tensor)
                    self._write(tensor, values, name)
            if self._kept:
                self._kept.clear()
            self._writer.flush()
            lost = [] if self._writer.lost is None else [self._writer.lost]
            index = DumpIndex(
                [replace(op.facts) for op in self._ops.values()],
                [t for t in self._tensors if self.stats or t.file is not None],
                [
                    *(*self._left_out.values(), *lost),
                    *(LeftOut(note, "", 0) for note in (*self._notes, *self.not_seen())),
                ],
                self._clock.spent / 1e9,
                self._clock.wall / 1e9,
                list(self._arguments),
            )
            written = list(self._writer.written)
            found = DumpResult(index, self._writer.folder, written, self._keeps, self)
            if self._keeps and self._writer.is_own:
                found.write(found.folder)
            return found

    def _take(
        self, values: Sequence[Any], op: _Op, wanted: Sequence[tuple[int, str]], execution: int
    ) -> None:
        if not self._takes or (self.first is not None and execution >= self.first):
            return
        for value, (position, what) in zip(values, wanted, strict=False):
            for part, tensor in tensors_in(op.tensors, [value]):
                self._one(tensor, op, what, f"{position}{part[1:]}", execution)

    def _one(self, tensor: Any, op: _Op, what: str, position: str, execution: int) -> None:
        try:
            values = host(op.tensors, tensor)
        except NotReadableError as error:
            self._leave_out(str(error), op, 0)
            return
        kept = self._room()
        size = self._size(values)
        if self._bytes + size > self.max_bytes:
            self._leave_out(f"more than {self.max_bytes} bytes", op, size)
            return
        if self._writer.is_full and not self.stats:
            self._leave_out(f"more than {self._writer.files} files", op, size)
            return
        self._bytes += size
        index, _, item = position.partition(".")
        of_input = what in ("input", "weight", "grad_input")
        named = of_input and int(index) < len(op.names)
        place = int(index), int(item) if item.isdecimal() else None
        entry = DumpedTensor(
            op.number,
            self._step,
            execution,
            what,
            position,
            op.names[int(index)] if named else "",
            values.dtype,
            list(values.array.shape),
            weight=op.weights.at(*place) if of_input else None,
        )
        if kept is not None:
            kept.append((entry, values, op.facts.name))
        else:
            self._tensors.append(entry)
            self._write(entry, values, op.facts.name)

    def _room(self) -> list[_Kept] | None:
        """Return the list that keeps tensors of this step, or None if they are written at once."""
        kept = self._kept
        if kept is None:
            return None
        if not kept or (kept[-1] and kept[-1][0][0].step != self._step):
            if len(kept) == kept.maxlen:
                self._bytes -= sum(self._size(values) for _, values, _ in kept[0])
            kept.append([])
        return kept[-1]

    def _size(self, values: HostTensor) -> int:
        return 0 if self.stats else int(values.array.nbytes)

    def _write(self, entry: DumpedTensor, values: HostTensor, name: str) -> None:
        if self.stats:
            entry.statistics = statistics_of(values, self.bins)
        else:
            self._writer.add(entry, values, name)

    def _leave_out(self, reason: str, op: _Op, size: int) -> None:
        left = self._left_out.setdefault(reason, LeftOut(reason, op.facts.name, self._step))
        left.tensors += 1
        left.bytes += size


class _Op:
    def __init__(self, context: OpContext, number: int) -> None:
        self.number = number
        self.tensors = facts_of(context)
        self.names = context.input_names
        self.weights = WeightKeys(context, views=True)
        self.facts = DumpedOp.of(
            context,
            inputs=describe_tensors(self.tensors, context.get_inputs()),
            input_roles=list(context.get("input_roles", ())),
            layout=context.get("layout"),
            weight_layout=context.get("weight_layout"),
        )
        #: The arguments of the last execution that was recorded.
        self.arguments: dict[str, Any] | None = None
        self.attributes: dict[str, Any] = {}
        #: Position and kind of a gradient -> number that arrived.
        self.gradients: dict[tuple[int, str], int] = {}


def _is_learned(context: OpContext, position: int) -> bool:
    roles = context.get("input_roles", ())
    role = roles[position] if position < len(roles) else ""
    if role == "right":  # The product may be a dense layer.
        return bool(context.get("weight_layout")) and context.value(position) is not None
    return role in ("weight", "bias")


def _write_at_end(tool: weakref.ref[Dump]) -> None:
    found = tool()
    if found is not None:
        found.result()
