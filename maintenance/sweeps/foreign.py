"""Run programs of other libraries and of torch's own features plain and instrumented.

Each is a small program as its users would write it. It runs twice plain, then under every routine
of `identity`, under a tool that counts and under the shipped tools, with both interceptors. All
values that it records, the random state and the fingerprint of torch are compared. The counts are
compared with those that follow from the program's own loops. Each runs in a process of its own, so
that a hang or a crash is a result as well. The programs are in `foreign_programs`.

Programs of TensorFlow run under a tool that only analyses, under one whose routines return None and
under the shipped tools.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.util
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import amanda

from .fingerprints import Fingerprint, changed
from .frameworks import FRAMEWORKS
from .identity import ROUTINES, Identity
from .models import LEFT_ALONE
from .observations import Facts, different, random_states, tensors, value
from .operators import INTERCEPTORS, VARIABLE, quiet
from .results import Failure, Part, commit, merged, read, versions
from .shipped import SHIPPED, WAYS, applied, differing, is_refusal, otherwise

#: Time after which a program counts as hanging; none needs a fifth of it.
SECONDS = 900


class Note:
    """Records the facts of a program's run.

    Attributes:
        facts: Facts to compare with the plain run.
        plain: Whether this is a plain run.
    """

    def __init__(self, *, plain: bool) -> None:
        self.facts: Facts = {}
        self.plain = plain

    def __call__(self, name: str, tree: Any) -> None:
        """Record all tensors in `tree` to the bit, or if there are none, the text of `tree`."""
        with amanda.disabled(), torch.no_grad():
            found = tensors(tree)
            for number, tensor in enumerate(found):
                self.facts[f"{name} {number}: value"] = value(tensor)
            if not found:
                self.facts[f"{name}: others"] = repr(tree)

    def training(self, model: torch.nn.Module, loss: Any = None) -> None:
        """Record a training step: loss, gradients, parameters and buffers."""
        step = sum(name.startswith("step") and name.endswith("end: others") for name in self.facts)
        self(f"step {step}, loss", loss)
        self(f"step {step}, gradients", [parameter.grad for parameter in model.parameters()])
        self(f"step {step}, parameters", list(model.parameters()))
        self(f"step {step}, buffers", list(model.buffers()))
        self(f"step {step}, end", None)

    def events(self, name: str, what: Any) -> None:
        """Record facts that copies legitimately change, such as the number of kernels in a
        profile.
        """
        self.facts[f"{name}: events"] = repr(what)


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: Name.
        run: Runs it and records its results.
        counts: Type of op -> number of executions, from the program's own loops.
        backward: Name of a backward op -> number of executions.
        needs: Modules that must be installed.
        processes: Number of processes that run it together, as ranks of one torch.distributed
            group.
        notice: Pattern of the warning that Amanda must give, or may give if the pattern matches an
            empty text; empty if no warning is expected.
        left_alone: Types of ops whose values are not copied, in addition to those of `models`, and
            why.
        framework: Name of its framework, torch or tensorflow.
        settings: Environment variables that its libraries read when they are imported.
    """

    name: str
    run: Callable[[Note], None]
    counts: Mapping[str, int]
    backward: Mapping[str, int]
    needs: tuple[str, ...] = ()
    processes: int = 1
    notice: str = ""
    left_alone: Mapping[str, str] = dataclasses.field(default_factory=dict)
    framework: str = "torch"
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def runs(self) -> tuple[tuple[str, str], ...]:
        """Its runs: interceptor of torch (empty if it has none), and how it is instrumented."""
        if self.framework == "torch":
            return tuple(RUNS)
        return tuple(("", how) for how in ("plain", "plain", "watch", "none", *WAYS))


class Watch(amanda.Tool):
    """Analyses every op, and inserts nothing."""

    def __init__(self) -> None:
        super().__init__()
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(lambda context: None, backward, require_outputs)


class Count(amanda.Tool):
    """Counts executions of ops by type, and of backward ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Insert a counter before an op."""
        op_type = context.op_type

        def count(*values: Any) -> None:
            self.forward[op_type] += 1

        context.insert_before_op(count)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Insert a counter before a backward op."""
        op_type = context.op_type

        def count(*values: Any) -> None:
            self.backward[op_type] += 1

        context.insert_before_backward_op(count)


@dataclasses.dataclass
class Seen:
    """Results of one run of a program, in one of its processes.

    Attributes:
        facts: The facts that the program recorded, and the random state; `error` if it raised.
        called: Number of calls of the routine.
        forward: Counts of ops by type.
        backward: Counts of backward ops by name.
        notices: Amanda's warnings.
        left: What has changed in torch.
        differing: Under shipped tools: what differs from the plain run, and by which tool.
    """

    facts: Facts
    called: int = 0
    forward: Mapping[str, int] = dataclasses.field(default_factory=dict)
    backward: Mapping[str, int] = dataclasses.field(default_factory=dict)
    notices: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    differing: list[str] = dataclasses.field(default_factory=list)


#: The runs of a program of torch: interceptor (empty for a plain run), and how it is instrumented.
RUNS = (
    *(("", "plain"), ("", "plain")),
    *((interceptor, how) for interceptor in INTERCEPTORS for how in (*ROUTINES, "count", *WAYS)),
)


def observe(program: Program) -> list[list[Seen]]:
    """Return all runs of a program, each as a list with one result for each of its processes."""
    if program.processes == 1:
        return [[seen] for seen in _runs(program)]
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=_rank, args=(program.name, rank, folder, results), daemon=True)
            for rank in range(program.processes)
        ]
        for process in ranks:
            process.start()
        try:
            found = dict(results.get(timeout=SECONDS / 2) for _ in ranks)
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
    return [list(seen) for seen in zip(*(found[rank] for rank in sorted(found)), strict=True)]


def _rank(name: str, rank: int, folder: str, results: Any) -> None:
    """Run one process of a group."""
    from .foreign_programs import PROGRAMS

    program = PROGRAMS[name]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=program.processes
    )
    try:
        with quiet():
            results.put((rank, _runs(program)))
    finally:
        torch.distributed.destroy_process_group()


def _runs(program: Program) -> list[Seen]:
    """Return all runs of a program in this process, with what each has changed in torch."""
    # The first import changes a few functions of torch.
    importlib.import_module("torch._dynamo")
    os.environ.update(program.settings)
    for module in program.needs:
        importlib.import_module(module)
    # The first run imports, and an import may draw random numbers.
    run(program, "plain")
    found = []
    before: Fingerprint = {}
    #: What plain runs change, such as custom gradients that TensorFlow registers under new names.
    varying: set[str] = set()
    for interceptor, how in program.runs:
        os.environ[VARIABLE] = interceptor
        found.append(run(program, how))
        if how in WAYS:
            found[-1].differing = _differing(program, how, found[0].facts, found[-1].facts)
        now = FRAMEWORKS[program.framework].fingerprint()
        if how != "plain":
            found[-1].left = [name for name in changed(before, now) if name not in varying]
        else:
            varying.update(changed(before, now) if before else ())
            before = now
    return found


def _differing(program: Program, way: str, plain: Facts, found: Facts) -> list[str]:
    """Return what differs under the shipped tools of a way, and because of which tool."""
    if program.processes > 1:
        return otherwise(way, plain, found)  # A single process of a group cannot run alone.
    return differing(way, plain, lambda how: found if how == way else run(program, how).facts)


def run(program: Program, how: str) -> Seen:
    """Run a program in this process."""
    torch.manual_seed(11)
    random.seed(11)
    tool: Any = None
    extent: AbstractContextManager[Any] = amanda.disabled()
    if how in WAYS or how in SHIPPED:
        extent = applied(how)
    elif how != "plain":
        left_alone = [*LEFT_ALONE, *program.left_alone]
        tool = (
            {"count": Count, "watch": Watch}[how]()
            if how not in ROUTINES
            else Identity(ROUTINES[how], left_alone=left_alone)
        )
        extent = amanda.apply(tool)
    note = Note(plain=how == "plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", amanda.AmandaWarning)
        try:
            with extent:
                program.run(note)
        except Exception as error:
            note.facts["error"] = f"{type(error).__name__}: {error}"
    note.facts["random state"] = random_states()
    seen = Seen(note.facts, notices=[str(warning.message) for warning in caught])
    if isinstance(tool, Identity):
        seen.called = tool.called
    elif isinstance(tool, Count):
        seen.forward, seen.backward = tool.forward, tool.backward
    return seen


def check(part: Part, program: Program) -> None:
    """Run one program in all ways and record what differs."""
    name = program.name
    missing = [module for module in program.needs if importlib.util.find_spec(module) is None]
    if missing:
        part.left_out[name] = f"{missing[0]} is not installed"
        return
    plain, again, *instrumented = observe(program)
    for one, two in zip(plain, again, strict=True):
        if "error" in one.facts:
            part.left_out[name] = f"it raises without Amanda: {one.facts['error']}"
            return
        if differ := different(one.facts, two.facts, results_only=False):
            part.left_out[name] = f"two plain runs differ from one another: {', '.join(differ[:4])}"
            return
    for op_type, reason in program.left_alone.items():
        part.left_out[f"{name}: the values of `{op_type}` under copies"] = reason
    for (interceptor, how), processes in zip(program.runs[2:], instrumented, strict=True):
        wrong = []
        for rank, seen in enumerate(processes):
            where = f"process {rank}: " if program.processes > 1 else ""
            wrong += [where + what for what in _wrong(program, how, plain[rank], seen)]
            part.counts["values compared"] += len(plain[rank].facts)
            part.counts["routines called"] += seen.called
            counted = seen.forward.values(), seen.backward.values()
            part.counts["executions counted"] += sum(map(sum, counted))
            for notice in {notice.splitlines()[0] for notice in seen.notices}:
                part.refused[f"{name}: {notice}"] += 1
            if is_refusal(how, error := seen.facts.get("error", "")):
                part.refused[f"{name}, {how}: {error}"] += 1
        part.cases[name] += 1
        if wrong:
            part.failures.append(Failure(name, f"{interceptor}, {how}", wrong[:8]))


def _wrong(program: Program, how: str, plain: Seen, seen: Seen) -> list[str]:
    if how in WAYS:
        wrong = seen.differing
    else:
        wrong = different(plain.facts, seen.facts, results_only=how == "clones")
        if "error" in seen.facts:
            wrong.append(f"raised {seen.facts['error']}")
    notices = "\n".join(seen.notices)
    # A shipped tool may warn about what it does not measure.
    unexpected = bool(notices) and not program.notice
    if how not in WAYS and (unexpected or not re.search(program.notice, notices)):
        wrong.append(f"warned of {seen.notices}, and not of {program.notice!r}")
    wrong += [f"left: {what}" for what in seen.left]
    if how == "count":
        for expected, found in ((program.counts, seen.forward), (program.backward, seen.backward)):
            wrong += [
                f"{op_type} counted {found.get(op_type, 0)} times, not {times}"
                for op_type, times in expected.items()
                if found.get(op_type, 0) != times
            ]
    return wrong


def chosen(only: str | None, sample: int | None, seed: int, framework: str = "torch") -> list[str]:
    """Return the names of the programs of one run."""
    from .foreign_programs import PROGRAMS

    of_framework = [program.name for program in PROGRAMS.values() if program.framework == framework]
    every = [name for name in of_framework if only is None or only in name]
    if sample is not None and sample < len(every):
        every = random.Random(seed).sample(every, sample)
    return every


def sweep(names: list[str], *, framework: str = "torch", verbose: bool = False) -> Part:
    """Run the programs of a framework, each in a process of its own."""
    from .foreign_programs import PROGRAMS

    part_name = "programs" if framework == "torch" else f"programs, {framework}"
    whole = Part(part_name, versions=versions())
    for name in names:
        if verbose:
            sys.stderr.write(f"{name}\n")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "found.json")
            command = [sys.executable, "-m", "maintenance.sweeps.foreign", str(path), name]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
                crash = done.stderr[-800:] or f"status {done.returncode}"
            except subprocess.TimeoutExpired:
                crash = f"hangs: it was ended after {SECONDS} s"
            if path.exists():
                part = dataclasses.replace(read(path), name=part_name)
                whole = merged([whole, part])[part_name]
            else:
                whole.cases[name] += 1
                whole.failures.append(Failure(name, "in a process of its own", [crash]))
        whole.runs[name] = f"{datetime.date.today()}, `{commit()}`"
    every = [program for program in PROGRAMS.values() if program.framework == framework]
    whole.totals["programs"] = len(every)
    return whole


def main(path: str, *names: str) -> None:
    """Run programs in this process and write the results to `path`."""
    from .foreign_programs import PROGRAMS

    part = Part("programs", versions=versions())
    with quiet():
        for name in names:
            check(part, PROGRAMS[name])
    part.write(Path(path))


if __name__ == "__main__":
    # Import by name, so that objects sent between processes have the same classes.
    from maintenance.sweeps import foreign

    foreign.main(*sys.argv[1:])
