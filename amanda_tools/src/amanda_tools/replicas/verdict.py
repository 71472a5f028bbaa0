"""`compare_replicas`: read what the processes of a run have recorded, and compare them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from amanda_core.errors import ResultError
from amanda_core.results.output import processes_in
from amanda_tools.fingerprint.files import Fingerprinted, load_fingerprint, place_of
from amanda_tools.replicas.pairs import Pair
from amanda_tools.replicas.recorded import Process
from amanda_tools.replicas.result import ReplicasReport, Violation
from amanda_tools.replicas.sums import norms, scales

__all__ = ["compare_replicas", "has_replicas"]

_TOOL = "replicas"
#: Up to so many processes, each is compared with each.
_FEW = 4


def has_replicas(path: Path) -> bool:
    """Return True if a folder has what the processes of a run have recorded."""
    if not path.is_dir():
        return False
    return any(place_of(part, _TOOL) is not None for part in [path, *processes_in(path)])


def compare_replicas(path: Path | str, ranks: Collection[int] | None = None) -> ReplicasReport:
    """Compare the processes of one run where they should be equal.

    Args:
        path: Folder of the results of the run, with a folder for each process.
        ranks: Numbers of the processes to compare; None for all.

    Raises:
        ResultError: There are no records of several processes, or they cannot be read.
        ImportError: NumPy is not installed.
    """
    folder, report = Path(path), ReplicasReport()
    parts = {part.name.partition("-restart")[0]: part for part in processes_in(folder)}
    if ranks is not None:
        named = {f"rank{number}" for number in ranks}
        parts = {name: part for name, part in parts.items() if name in named}
    processes = []
    for name, part in parts.items():
        if (record := place_of(part, _TOOL)) is None:
            report.missing.append(f"{name} has no record of the tool replicas")
            continue
        run = load_fingerprint(record)
        if not run.ended:
            report.missing.append(f"{name} is not complete: {run.damage or 'it broke off'}")
        processes.append(_process(name, run))
        if (count := processes[-1].unreadable) > 0:
            report.missing.append(f"{name} has {count} weights and gradients without a digest")
    if len(processes) < 2:
        raise ResultError(
            "There are no records of several processes",
            where=str(path),
            fix="Run the program in several processes under the tool: amanda run -t replicas -o "
            "OUT -m torch.distributed.run --nproc-per-node 2 PROGRAM",
        )
    expected = max(process.processes for process in processes)
    if ranks is None and expected > len(processes):
        report.missing.append(f"Of {expected} processes there are records of {len(processes)}")
    report.processes = [process.name for process in processes]
    _compare(processes, report)
    return report


def _process(name: str, run: Fingerprinted) -> Process:
    """Return the record of a process. The reader trusts nothing in the files."""
    about = run.about
    patterns = [about.get(kind, []) for kind in ("replicated", "sharded")]
    groups = about.get("groups", {})
    is_whole = (
        all(isinstance(one, list) and all(isinstance(p, str) for p in one) for one in patterns)
        and isinstance(groups, dict)
        and isinstance(about.get("processes", 1), int)
    )
    if not is_whole:
        raise ResultError(
            "This is not a record of the tool replicas: what it says about the run is malformed",
            where=str(run.folder),
            fix="Record the run again",
        )
    return Process(name, run)


def _compare(processes: Sequence[Process], report: ReplicasReport) -> None:
    weights: set[str] = set()
    for one, other in _pairs(processes):
        pair = Pair(one, other)
        report.violations += pair.violations()
        weights |= pair.replicas
        for kind, count in pair.compared.items():
            report.compared[kind] = report.compared.get(kind, 0) + count
    report.weights = len(weights)
    if any(process.first_backward for process in processes) and not report.compared["gradients"]:
        report.notes.append(
            "No gradients were compared: no optimizer read whole ones of replicated weights"
        )
    last = min((one.step for one in report.violations), default=None)
    for step in sorted({step for process in processes for step in process.steps}):
        if last is not None and step > last:
            break  # What differs later follows from it.
        found = [*scales(processes, step), *norms(processes, step)]
        report.violations += found
        last = step if found else last
    report.violations = _merged(sorted(report.violations, key=lambda one: (one.step, one.order)))


def _merged(violations: Sequence[Violation]) -> list[Violation]:
    """Return violations with one for each value, which names all processes in which it differs."""
    found: dict[tuple[str, str, int], Violation] = {}
    for one in violations:
        first = found.setdefault((one.kind, one.what, one.step), one)
        first.processes += [name for name in one.processes if name not in first.processes]
    return list(found.values())


def _pairs(processes: Sequence[Process]) -> Iterator[tuple[Process, Process]]:
    """Yield each process with each, or with those at distances of 1, 2, 4 and so on.

    The dimensions of a mesh are such distances.
    """
    count = len(processes)
    for first, process in enumerate(processes):
        distance = 1
        while first + distance < count:
            yield process, processes[first + distance]
            distance = distance + 1 if count <= _FEW else distance * 2
