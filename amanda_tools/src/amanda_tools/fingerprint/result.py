"""`FingerprintResult`: what was recorded, by step, and where the files are."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from amanda_core.results import Table
from amanda_tools.fingerprint.files import (
    NONE,
    OPS,
    OUTPUT,
    ROWS,
    UNREADABLE,
    UNSEEN_WRITER,
    UNWRITTEN,
    Fingerprinted,
    Stream,
    digest_of,
    load_fingerprint,
)
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.folders import create_folder, whole_file
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    render_json,
)

__all__ = ["FingerprintResult", "FingerprintedStep", "UnseenWrite"]


@dataclass
class FingerprintedStep:
    """What was recorded of one step.

    Attributes:
        step: The step.
        executions: Number of executions of operators, forward and backward.
        values: Number of tensors with a digest.
        digest: Digest of all of them in the order of execution, as hexadecimal digits.
    """

    step: int
    executions: int
    values: int
    digest: str


@dataclass
class UnseenWrite:
    """A value that changed although no operator that was seen wrote it.

    Attributes:
        reader: What read the changed value.
        producer: The operator that wrote it before, or None.
        step: The step.
    """

    reader: str
    producer: str | None
    step: int


@dataclass
class FingerprintResult(Tabular):
    """Result of recording a run.

    Attributes:
        steps: What was recorded of each step.
        ops: Number of operators, forward and backward.
        unwritten: Number of tensors in memory that nothing had written yet.
        unreadable: Number of tensors without a digest.
        unseen_writes: The first values that changed without an operator that writes them.
        folder: Folder of the files.
        notes: What was not recorded, and why.
        problems: What could not be written.
        tool_seconds: Time spent in the tool itself.
        wall_seconds: Time from the tool's first work to its last.
        level: What has a digest: ``operators``, ``modules`` or ``steps``. In the latter two, values
            are digests of many, and executions are visits of a module.
    """

    records = "steps", FingerprintedStep

    _format: ClassVar[str] = "amanda.fingerprint/1"

    steps: list[FingerprintedStep]
    ops: int
    unwritten: int
    unreadable: int
    unseen_writes: list[UnseenWrite]
    folder: Path
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    level: str = "operators"
    #: The tool, kept alive as long as its temporary folder is needed.
    _owner: Any = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        stream: Stream,
        notes: list[str],
        tool_seconds: float,
        wall_seconds: float,
        owner: object,
    ) -> FingerprintResult:
        """Return the result of what a stream has written."""
        import numpy

        found = load_fingerprint(stream.folder)
        rows = found.rows
        rows = rows[rows["what"] <= OUTPUT]
        steps = []
        for step in numpy.unique(rows["step"]).tolist():
            own = rows[rows["step"] == step]
            values = own[(own["what"] != NONE) & (own["flags"] & (UNWRITTEN | UNREADABLE) == 0)]
            executions = len(numpy.unique(own[["op", "execution"]]))
            digest = digest_of(numpy.ascontiguousarray(values["digest"]))
            steps.append(FingerprintedStep(step, executions, len(values), f"{digest:016x}"))
        problems = []
        if stream.problem:
            problems.append(f"{format_count(stream.lost, 'row')} {stream.problem}")
        return cls(
            steps,
            len(found.ops),
            int((rows["flags"] & UNWRITTEN != 0).sum()),
            int((rows["flags"] & UNREADABLE != 0).sum()),
            unseen_writes(found),
            stream.folder,
            notes,
            problems,
            tool_seconds,
            wall_seconds,
            found.level,
            owner,
        )

    def open(self) -> Fingerprinted:
        """Return all that was recorded."""
        return load_fingerprint(self.folder)

    @property
    def title(self) -> str:
        """Return a summary in one line."""
        executions = sum(step.executions for step in self.steps)
        values = sum(step.values for step in self.steps)
        text = [
            f"{format_count(values, 'value')} of {format_count(executions, 'execution')} of "
            f"{format_count(self.ops, 'operator')}"
            if self.level == "operators"
            else f"{format_count(values, 'digest')} of {self.level}"
        ]
        if self.unseen_writes:
            first = self.unseen_writes[0]
            text.append(f"unseen writes, first before {first.reader} in step {first.step}")
        text += describe_overhead("fingerprints", self.tool_seconds, self.wall_seconds)
        return "; ".join([*text, *self.notes])

    def table(self) -> Table:
        """Return a table with one row for each step. Equal runs have equal digests."""
        rows = [(one.step, one.executions, one.values, one.digest) for one in self.steps]
        return Table(self.title, ("step", "executions", "values", "digest"), rows)

    def to_json(self) -> str:
        """Return the summary as JSON; the rows are in the files."""
        drawn = [
            charts.figures(
                charts.figure("operators", self.ops),
                charts.figure("values", sum(step.values for step in self.steps)),
            ),
        ]
        # Not where the files were: they are beside this one.
        content = {n: v for n, v in fields_of(self).items() if n != "folder" and n[0] != "_"}
        return render_json({"format": self._format, **content, "charts": drawn})

    def write(self, folder: Path | str) -> list[Path]:
        """Copy the files into a folder.

        Returns:
            The files in `folder`.
        """
        folder = create_folder(folder)
        for name in (OPS, ROWS):
            if folder != self.folder:
                with whole_file(folder / name) as new:
                    shutil.copyfile(self.folder / name, new)
        return [folder / name for name in (OPS, ROWS)]


def unseen_writes(found: Fingerprinted, limit: int = 20) -> list[UnseenWrite]:
    """Return the first values that changed although no operator that was seen wrote them."""
    rows = found.rows
    writes = []
    for row in rows[rows["flags"] & UNSEEN_WRITER != 0][:limit]:
        made = rows[rows["order"] == row["producer"]]
        producer = found.ops[made[0]["op"]].name if len(made) else None
        writes.append(UnseenWrite(found.place_of(row), producer, int(row["step"])))
    return writes
