"""Programs of several ranks under every shipped tool, compared with one process.

`python -m maintenance.sweeps.ranks --ranks 2 4 --page FILE` writes the page beside this
file. Each rank runs every program under every tool. A tool that only looks must leave losses and
parameters as they are, to the bit; one that decides must decide what it does in one process, or
refuse by name. A negative number of ranks is simulated in one process. `--results FILE` keeps what
is found, and a sweep that is run in parts adds to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import amanda
from amanda_core.interface import NotReadableError
from amanda_tools.prune import Prune, PruneNM, PruneTiles
from amanda_tools.quantize import Quantize
from amanda_tools.replicas import compare_replicas
from maintenance.sweeps.rank_programs import PROGRAMS, Program, digests, network, samples, steps
from maintenance.sweeps.results import commit

__all__ = ["DECIDING", "differences", "run"]

ROOT = Path(__file__).resolve().parents[2]
#: The program without ranks.
ALONE = "one process"
#: What says of which sources a row is: a sweep may be run in parts.
_COMMIT = "commit"
#: Tools that decide for weights, or by the data of a batch.
DECIDING: dict[str, Callable[[], Any]] = {
    "prune, half": lambda: Prune(0.5),
    "prune, global": lambda: Prune(0.5, scope="global"),
    "prune, taylor": lambda: Prune(0.5, score="taylor"),
    "prune, scheduled": lambda: Prune(0.6, steps=2, score="taylor"),
    "prune_nm, 2:4": lambda: PruneNM(2, 4),
    "prune_tiles, half": lambda: PruneTiles(0.5, 4),
    "quantize, minmax": lambda: Quantize(calibration=1),
    "quantize, mse": lambda: Quantize(calibration=1, observer="mse"),
    "quantize, percentile": lambda: Quantize(calibration=1, observer="percentile", percentile=99),
    "quantize, dynamic": lambda: Quantize("dynamic"),
}


class _Ids(amanda.Tool):
    """Notes the op ids and weights of the model, and the op ids of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.collectives: list[Any] = []
        self.add_inst_for_op(self._note)

    def _note(self, context: amanda.OpContext) -> None:
        if context.op_type.startswith("c10d::"):
            self.collectives.append((context.get_op_id(), context.name))
        elif context.zone == "model":
            weights = tuple(weight.owner for weight in context.weights.values())
            self.found.append((context.get_op_id(), context.name, weights))


def _decided(tool: Any) -> dict[str, Any]:
    """Return the masks and scales of a tool as tensors, and what it left out."""
    found: dict[str, Any] = {}
    masks = getattr(tool, "masks", None)
    for name, mask in {} if masks is None else masks.saved().items():
        whole = mask.full_tensor() if hasattr(mask, "full_tensor") else mask
        whole = whole.reconcile() if hasattr(whole, "reconcile") else whole
        found[name] = (whole != 0).cpu()
    if isinstance(tool, Quantize):
        for name, scale in tool.grids.saved().items():
            found[name] = torch.as_tensor(scale)
        for one in tool.result().activations:
            found[f"{one.op}/{one.operand}"] = torch.tensor([one.scale or -1.0, one.zero])
    return found


def _tools(chosen: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Return the tools under which a program runs: those that are chosen, or all."""
    from every_tool import EDITING, TOOLS

    every: dict[str, Callable[[], Any]] = {"plain": amanda.Tool, "ids": _Ids, **DECIDING}
    every |= {**TOOLS, **EDITING}
    return {name: every[name] for name in chosen or every}


def _work(rank: int, ranks: int, folder: Path, program: str, tools: list[str]) -> None:
    """Run a program under tools as one rank, until one of them refuses it or fails."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    samples()
    if ranks > 1:
        where: dict[str, Any] = {"init_method": f"file://{folder / 'store'}", "rank": rank}
        patience = timedelta(minutes=4)
        dist.init_process_group("gloo", world_size=ranks, timeout=patience, **where)
    found: dict[str, Any] = {}
    for name, make in _tools(tools).items():
        torch._dynamo.reset()  # Otherwise it compiles a function at most eight times.
        tool, error, losses = make(), "", []
        try:
            if ranks == 1:
                train, model, place = steps, network(), (0, 1)
            else:
                how = PROGRAMS[program]
                train, model, place = how.train, how.wrap(network()), how.place(rank, ranks)
            with amanda.apply(tool):
                losses = train(model, *place)
            losses += digests(model)
        except amanda.AmandaError as refused:
            error = str(refused)
        except Exception as unexpected:
            error = f"WRONG: {type(unexpected).__name__}: {unexpected}"
        result: Any = tool.result() if hasattr(tool, "result") else None
        if name == "replicas" and ranks > 1:
            result.write(folder / "records" / f"rank{rank}" / name)
        found[name] = _found(tool, losses, error)
        if error:
            break  # The ranks are no longer at the same place.
    torch.save(found, folder / f"{rank}")
    if ranks > 1 and not error:
        dist.destroy_process_group()
    os._exit(0)  # Gloo's threads may abort a process that ends (pytorch/pytorch#179291).


def _simulate(ranks: int, folder: Path, program: str, tools: list[str]) -> None:
    """Run a program under tools as all ranks, in one process, and as one process."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    samples()
    how = PROGRAMS[program]
    for name, mode in (("alone", nullcontext()), ("0", LocalTensorMode(ranks))):
        if name == "0":
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        found: dict[str, Any] = {}
        for tool_name, make in _tools(tools).items():
            tool, error, losses, model = make(), "", [], network(3 * ranks)
            try:
                with mode:
                    model = how.wrap(model) if name == "0" else model
                    with amanda.apply(tool):
                        losses = [*how.train(model, *how.place(0, ranks)), *digests(model)]
                    found[tool_name] = _found(tool, losses, "")
            except Exception as failed:
                known = isinstance(failed, (amanda.AmandaError, NotReadableError))
                error = f"{'' if known else f'WRONG: {type(failed).__name__}: '}{failed}"
                found[tool_name] = _found(tool, [], error)
        torch.save(found, folder / name)
    os._exit(0)


def _found(tool: Any, losses: list[Any], error: str) -> dict[str, Any]:
    """Return what `differences` compares."""
    result: Any = tool.result() if hasattr(tool, "result") else None
    return {
        "losses": losses,
        "error": error,
        "decided": _decided(tool) if not error else {},
        "ids": getattr(tool, "found", []),
        "collectives": getattr(tool, "collectives", []),
        "left out": sorted({one.reason for one in getattr(result, "unreached", ())}),
        "noted": [
            note for note in getattr(result, "notes", ()) if "of this process, one of" in note
        ],
        "stay": [
            note
            for note in getattr(result, "notes", ())
            if note.endswith((": they stay", ": processes hold parts of it", "different values"))
        ],
    }


def _started(program: str, tools: Sequence[str], ranks: int, seconds: float) -> list[Any]:
    """Run a program under tools; return what each rank has found until one was at an end."""
    paths = [str(ROOT), *(str(path) for path in ROOT.glob("*/src"))]
    kept = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "maintenance.sweeps.ranks", "--work"]
        started = [
            subprocess.Popen(
                [
                    *command,
                    *map(str, (rank, ranks, name)),
                    "--programs",
                    program,
                    "--tools",
                    *tools,
                ],
                env={name: v for name, v in kept.items() if name != "PYTHONSAFEPATH"},
                cwd=ROOT,
            )
            for rank in range(max(ranks, 1))
        ]
        try:
            for process in started:
                if process.wait(seconds):
                    raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        finally:
            for process in started:
                process.kill()
        files = map(str, range(ranks)) if ranks > 0 else ("0", "alone")
        found = [torch.load(folder / file, weights_only=False) for file in files]
        if ranks > 1 and "replicas" in found[0]:
            report = compare_replicas(folder / "records")
            found[0]["replicas"]["alarms"] = [str(one) for one in report.violations]
        return found


def run(
    programs: Sequence[str],
    tools: Sequence[str] = (),
    ranks: int = 2,
    seconds: float = 600,
    alone: dict[Any, Any] | None = None,
) -> list[dict[Any, Any]]:
    """Run programs under tools, and return what each rank has found, with one process at the end.

    Args:
        programs: Names of programs.
        tools: Names of tools; all of them if there are none.
        ranks: How many ranks run each program.
        seconds: How long a rank may take.
        alone: What one process has found, if it is known.

    Raises:
        TimeoutExpired: A rank did not end.
    """
    found: list[dict[Any, Any]] = [*({} for _ in range(ranks)), alone or {}]
    all_programs = [(program, ranks) for program in programs]
    for program, count in [*all_programs, *([] if alone else [(ALONE, 1)])]:
        missing = list(_tools(tools))
        while missing:
            each = _started(program, missing, count, seconds)
            for known, new in zip(found if count > 1 else found[-1:], each, strict=False):
                known |= {(program, tool): what for tool, what in new.items()}
            # A program that fails without tools fails under all.
            fails = any(of.get("plain", {}).get("error") for of in each)
            missing = [] if fails else missing[max(map(len, each)) :]
    return found


def simulate(
    program: str, tools: Sequence[str] = (), ranks: int = 8, seconds: float = 600
) -> list[dict[Any, Any]]:
    """Run a program as many ranks in one process (`LocalTensorMode`); return what `run` does."""
    found = _started(program, tools, -ranks, seconds)
    names = program, ALONE
    return [{(name, tool): of[tool] for tool in of} for name, of in zip(names, found, strict=True)]


def differences(found: list[dict[Any, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield each program and tool with what is wrong, refused or left out; empty if equal."""
    *ranks, one = found
    for (program, tool), first in ranks[0].items():
        each = [rank[program, tool] for rank in ranks if (program, tool) in rank]
        if any(rank["error"] for rank in each) or len(each) < len(ranks):
            same = len({bool(rank["error"]) for rank in each}) == 1 and len(each) == len(ranks)
            texts = sorted(rank["error"] for rank in each if rank["error"])
            wrong = [text for text in texts if text.startswith("WRONG")]
            if PROGRAMS[program].differs and len(wrong) < len(texts):
                texts = [f"{text}; the others wait" for text in texts if text not in wrong]
                wrong = []
            text = next(iter(wrong or texts), "it has ended")
            how = "refused: " if same else "WRONG: one rank: "
            yield program, tool, text if text.startswith("WRONG") else how + text
            continue
        if tool in DECIDING:
            wrong = [*_decisions(PROGRAMS[program], each, one[ALONE, tool])]
        elif tool == "ids":
            wrong = [*_identities(PROGRAMS[program], each, one[ALONE, tool])]
        else:
            kept = all(
                now["losses"] == rank[program, "plain"]["losses"]
                for now, rank in zip(each, ranks, strict=True)
            )
            wrong = [] if kept else ["losses or parameters differ"]
        wrong += [f"replicas: {alarm}" for alarm in first.get("alarms", ())]
        left_out = {reason for rank in each for reason in rank["left out"]}
        left_out -= set(one[ALONE, tool]["left out"])
        left = f"left out: {'; '.join(sorted(left_out))}" if left_out else ""
        notes = sorted({note for rank in each for note in (*rank["noted"], *rank["stay"])})
        left = left or "; ".join(f"noted: {note}" for note in notes)
        yield program, tool, f"WRONG: {'; '.join(wrong)}" if wrong else left


def _decisions(program: Program, each: list[Any], alone: Any) -> Iterator[str]:
    """Yield what is wrong with the decisions of one tool in each rank, beside one process."""
    whole: dict[str, Any] = {}
    for rank in each:
        for name, value in rank["decided"].items():
            if "/" in name and rank["noted"]:
                whole.setdefault(name, value)
            elif not torch.equal(whole.setdefault(name, value), value):
                yield f"ranks decide differently for {name}"
        if program.batch != "stage" and rank["decided"].keys() != each[0]["decided"].keys():
            yield "ranks decide for different weights"
    left_out = any(rank["left out"] != alone["left out"] for rank in each)
    stay = {note.partition(" ")[0] for rank in each for note in rank["stay"]}
    expected = {
        name: value
        for name, value in alone["decided"].items()
        if name.rpartition("/")[0] not in stay
    }
    for name, value in whole.items():
        if name not in alone["decided"]:
            yield f"{name} is of no weight"
            continue
        wanted = expected.get(name, value)
        # Where weights are left out, what comes after them computes with others.
        if not left_out and _is_exact(program, name) and not _close(value, wanted):
            yield f"{name} differs from one process"
    missing = expected.keys() - whole.keys()
    if not left_out and missing:
        yield f"{len(missing)} not decided, without a reason"


def _is_exact(program: Program, name: str) -> bool:
    """Return False for what is not decided of the same values as in one process."""
    # Ranges of operands are those of micro-batches in a pipeline.
    return program.is_exact and not (program.batch == "stage" and "/" in name)


def _close(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(value.double(), wanted.double(), 1e-6)


def _identities(program: Program, each: list[Any], alone: Any) -> Iterator[str]:
    """Yield what is wrong with the ids and names of operators in each rank."""
    found, wanted = [set(rank["ids"]) for rank in each], set(alone["ids"])
    if program.ids == "modules":
        found = [{one for one in set.union(*found) if "/" in one[1]}]
        wanted = {one for one in wanted if "/" in one[1]}
    elif any(rank["collectives"] != each[0]["collectives"] for rank in each):
        yield "ids of collectives differ"
    if any(one != found[0] for one in found):
        yield "ids differ"
    if program.ids != "ranks" and found[0] != wanted:
        yield "ids differ from one process"


def _page(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the page of what was found: number of ranks -> program -> tool -> what."""
    from every_tool import EDITING, TOOLS

    columns: dict[str, Sequence[str]] = {
        **{name: [name] for name in ("plain", "ids")},
        f"tools that look ({len(TOOLS)})": list(TOOLS),
        f"edits that change nothing ({len(EDITING)})": list(EDITING),
        **{name: [name] for name in DECIDING},
    }
    notes: dict[str, int] = {}

    def cell(found: dict[str, str], tools: Sequence[str]) -> str:
        marks = {
            f"[{notes.setdefault(found[tool], len(notes) + 1)}]" if found[tool] else "="
            for tool in tools
            if tool in found
        }
        return " ".join(sorted(marks))

    rows = [
        f"| {program} | {ranks if int(ranks) > 0 else f'{-int(ranks)} in one process'} | "
        f"{by_program[program].get(_COMMIT, '')} | "
        + " | ".join(cell(by_program[program], tools) for tools in columns.values())
        + " |"
        for program in PROGRAMS
        for ranks, by_program in sorted(results.items(), key=lambda item: abs(int(item[0])))
        if program in by_program
    ]
    lines = [
        "# Programs of several ranks under every tool",
        "",
        f"Written by `python -m maintenance.sweeps.ranks`: ranks on gloo, or all of them in one "
        f"process (`LocalTensorMode`, which runs no other of these programs), PyTorch "
        f"{torch.__version__}. Tools that look, and edits that change nothing, leave losses and "
        "parameters as they are without tools, to the bit, in training and in evaluation after "
        "each step. Tools that decide have the masks and scales of one process with the whole "
        "batch, in all ranks; in bfloat16, and where ranks have other batches than one process, "
        "they are the same in all ranks. What `replicas` compares is equal. `ids` are op ids and "
        "names of weights: those of one process, but for layers that are tensor parallel, where "
        "they are the same in all ranks. A sweep may be run in parts: each row names the commit of "
        "the sources.",
        "",
        f"| program | ranks | {_COMMIT} | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 3) + "|",
        *rows,
        "",
        "`=`: as it should be.",
        "",
        *(f"{number}. {text}" for text, number in notes.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the sweep, or one rank of it; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.sweeps.ranks")
    parser.add_argument("--work", nargs=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--tools", nargs="*", default=[])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "shared"))
    if options.work:
        rank, ranks, folder = options.work
        how = Path(folder), options.programs[0], options.tools
        _work(int(rank), int(ranks), *how) if int(ranks) > 0 else _simulate(-int(ranks), *how)
    known = options.results is not None and options.results.exists()
    results = json.loads(options.results.read_text()) if known else {}
    wrong = 0
    alone = run([], options.tools)[-1] if max(options.ranks) > 0 else None
    for ranks in options.ranks:
        for program in options.programs:
            try:
                # A negative number of ranks is simulated in one process.
                every = (
                    run([program], options.tools, ranks, alone=alone)
                    if ranks > 0
                    else simulate(program, options.tools, -ranks)
                )
                found = [*differences(every)]
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found = [(program, "plain", f"WRONG: {error}")]
            for _, tool, what in found:
                wrong += what.startswith("WRONG")
                if what:
                    print(f"{ranks} ranks, {program}, {tool}: {what}", flush=True)
                rows = results.setdefault(str(ranks), {}).setdefault(program, {})
                rows |= {tool: what, _COMMIT: commit()}
            if options.results:
                options.results.write_text(json.dumps(results, indent=1))
    if options.page:
        options.page.write_text(_page(results))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
