"""Programs of several ranks under every shipped tool, compared with one process.

`python -m maintenance.sweeps.ranks --page maintenance/sweeps/ranks.md` writes that page. Each rank
runs every program under every tool. A tool that only looks must leave losses as they are, to the
bit; one that decides must decide what it does in one process, or refuse by name.
"""

# mypy: allow-untyped-calls
# Much of torch.distributed is not annotated.

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import amanda
from amanda_tools.prune import Prune, PruneNM, PruneTiles
from amanda_tools.quantize import Quantize
from amanda_tools.replicas import compare_replicas

__all__ = ["DECIDING", "PROGRAMS", "differences", "run"]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
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
            weights = [weight.owner for weight in context.weights.values()]
            self.found.append((context.get_op_id(), context.name, weights))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(12, 4))


def _ddp(model: Any, mesh: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp1(original: bool) -> Callable[[Any, Any], Any]:
    def wrap(model: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        options: Any = {"use_orig_params": original, "device_id": torch.device("cpu")}
        for number in range(2):
            model[number] = FullyShardedDataParallel(model[number], **options)
        return FullyShardedDataParallel(model, **options)

    return wrap


def _fsdp2(**options: Any) -> Callable[[Any, Any], Any]:
    def wrap(model: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        if (dtype := options.get("dtype")) is not None:
            mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            more: dict[str, Any] = {"mp_policy": mixed}
        else:
            more = dict(options)
        for number in range(2):
            fully_shard(model[number], mesh=mesh, **more)
        fully_shard(model, mesh=mesh, **more)
        return model

    return wrap


def _tensor_parallel(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: Any = {}
    for number in range(2):
        plan[f"{number}.0"], plan[f"{number}.2"] = ColwiseParallel(), RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def _compiled(model: Any, mesh: Any) -> Any:
    return torch.compile(_ddp(model, mesh), backend="aot_eager")


#: Name -> wraps the model.
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "DDP": _ddp,
    "DDP, static graph": lambda model, mesh: nn.parallel.DistributedDataParallel(
        model, static_graph=True
    ),
    "DDP, torch.compile": _compiled,
    "ZeRO": _ddp,
    "FSDP1, original parameters": _fsdp1(True),
    "FSDP1, flat parameters": _fsdp1(False),
    "FSDP2": _fsdp2(),
    "FSDP2, no reshard": _fsdp2(reshard_after_forward=False),
    "FSDP2, bf16": _fsdp2(dtype=torch.bfloat16),
    "tensor parallel": _tensor_parallel,
}
#: What differs from one process, and why. In bfloat16 sums and activations are rounded.
_ROUNDED = ("FSDP2, bf16",)


def _train(program: str, model: Any, rank: int, ranks: int) -> list[float]:
    if program == "ZeRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if program == "tensor parallel":
        rank, ranks = 0, 1  # All have the same batch.
    samples, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x, y = (torch.randn(8, n, generator=samples)[rank::ranks] for n in (12, 4))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # Kept results of weights would be read here.
            found += [loss.item(), model(x).square().sum().item()]
    return found


def _decided(tool: Any) -> dict[str, Any]:
    """Return the masks and scales of a tool as tensors, and what it left out."""
    found: dict[str, Any] = {}
    masks = getattr(tool, "masks", None)
    for name, mask in {} if masks is None else masks.saved().items():
        whole = mask.full_tensor() if hasattr(mask, "full_tensor") else mask
        found[name] = (whole != 0).cpu()
    if isinstance(tool, Quantize):
        for name, scale in tool.grids.saved().items():
            found[name] = torch.as_tensor(scale)
        for one in tool.result().activations:
            found[f"{one.op}/{one.operand}"] = torch.tensor([one.scale or -1.0, one.zero])
    return found


def _work(rank: int, ranks: int, folder: Path, programs: list[str], tools: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "shared"))
    from every_tool import EDITING, TOOLS

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh: Any = None
    if ranks > 1:
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (ranks,))
    every: dict[str, Callable[[], Any]] = {
        "plain": amanda.Tool,
        "ids": _Ids,
        **TOOLS,
        **EDITING,
        **DECIDING,
    }
    found = {}
    for program in programs:
        for name in tools or every:
            if program == "DDP, torch.compile" and name in {**TOOLS, **EDITING} and not tools:
                continue  # Compiling takes long; `tests/programs` have compiled programs.
            model = network() if ranks == 1 else PROGRAMS[program](network(), mesh)
            if rank == 0 and os.environ.get("AMANDA_SWEEP_VERBOSE"):
                print(f"{ranks} ranks: {program}, {name}", file=sys.stderr, flush=True)
            torch._dynamo.reset()  # Otherwise it compiles a function at most eight times.
            tool, error, losses = every[name](), "", []
            try:
                with amanda.apply(tool):
                    losses = _train(program if ranks > 1 else "", model, rank, ranks)
            except amanda.AmandaError as refused:
                error = str(refused)
            except Exception as unexpected:
                error = f"WRONG: {type(unexpected).__name__}: {unexpected}"
            if error and os.environ.get("AMANDA_SWEEP_VERBOSE"):
                print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            result: Any = tool.result() if hasattr(tool, "result") else None
            if name == "replicas" and ranks > 1:
                result.write(folder / "records" / program / f"rank{rank}" / name)
            found[program, name] = {
                "losses": losses,
                "error": error,
                "decided": _decided(tool) if not error else {},
                "ids": getattr(tool, "found", []),
                "collectives": getattr(tool, "collectives", []),
                "left out": sorted({one.reason for one in getattr(result, "unreached", ())}),
            }
    torch.save(found, folder / f"{rank}")
    if ranks > 1:
        dist.destroy_process_group()
    os._exit(0)  # Gloo's threads may abort a process that ends (pytorch/pytorch#179291).


def run(
    programs: Sequence[str], tools: Sequence[str] = (), ranks: int = 2, seconds: float = 600
) -> list[dict[Any, Any]]:
    """Run programs under tools, and return what each rank has found, with one process at the end.

    Raises:
        TimeoutExpired: A rank did not end.
    """
    paths = [str(ROOT), *(str(path) for path in ROOT.glob("*/src"))]
    kept = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "one").mkdir()
        started = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "maintenance.sweeps.ranks", "--work", *map(str, how)),
                    *("--programs", *chosen, "--tools", *tools),
                ],
                env={name: v for name, v in kept.items() if name != "PYTHONSAFEPATH"},
                cwd=ROOT,
            )
            for how, chosen in [
                *(((rank, ranks, folder), programs) for rank in range(ranks)),
                ((0, 1, folder / "one"), ["one process"]),
            ]
        ]
        try:
            for process in started:
                if process.wait(seconds):
                    raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        finally:
            for process in started:
                process.kill()
        files = [*(folder / str(rank) for rank in range(ranks)), folder / "one" / "0"]
        found = [torch.load(file, weights_only=False) for file in files]
        for program, tool in found[0]:
            if tool == "replicas" and ranks > 1:
                report = compare_replicas(folder / "records" / program)
                found[0][program, tool]["alarms"] = [str(one) for one in report.violations]
        return found


def differences(found: list[dict[Any, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield each program and tool with what is wrong, refused or left out; empty if equal."""
    *ranks, one = found
    for (program, tool), first in ranks[0].items():
        each = [rank[program, tool] for rank in ranks]
        alone = one["one process", tool]
        if any(rank["error"] for rank in each):
            same = len({bool(rank["error"]) for rank in each}) == 1
            text = next(rank["error"] for rank in each if rank["error"])
            how = "refused: " if same else "WRONG: one rank: "
            yield program, tool, text if text.startswith("WRONG") else how + text
            continue
        wrong = []
        if tool in DECIDING:
            names = [first["decided"].keys() == rank["decided"].keys() for rank in each]
            equal = all(names) and all(
                torch.equal(rank["decided"][name], value)
                for rank in each
                for name, value in first["decided"].items()
            )
            wrong += [] if equal else ["ranks decide differently"]
            known = {n: v for n, v in first["decided"].items() if n in alone["decided"]}
            wrong += [f"{n} is of no weight" for n in first["decided"] if n not in known]
            # Where weights are left out, what comes after them computes with others.
            if program not in _ROUNDED and first["left out"] == alone["left out"]:
                wrong += [
                    f"{name} differs from one process"
                    for name, value in known.items()
                    if not torch.allclose(value.double(), alone["decided"][name].double(), 1e-6)
                ]
            missing = len(alone["decided"]) - len(known)
            if missing and not first["left out"]:
                wrong.append(f"{missing} not decided, without a reason")
        elif tool == "ids":
            same = all(rank[of] == first[of] for rank in each for of in ("ids", "collectives"))
            wrong += [] if same else ["ids differ"]
            if program != "tensor parallel" and first["ids"] != alone["ids"]:
                wrong.append("ids differ from one process")
        elif any(
            rank[program, tool]["losses"] != rank[program, "plain"]["losses"] for rank in ranks
        ):
            wrong.append("losses differ")
        wrong += [f"replicas: {alarm}" for alarm in first.get("alarms", ())]
        left = f"left out: {first['left out'][0]}" if first["left out"] != alone["left out"] else ""
        yield program, tool, f"WRONG: {'; '.join(wrong)}" if wrong else left


def _page(found: list[dict[Any, Any]], ranks: int) -> str:
    rows: dict[str, dict[str, str]] = {}
    notes: dict[str, int] = {}
    for program, tool, what in differences(found):
        mark = "=" if not what else f"[{notes.setdefault(what, len(notes) + 1)}]"
        rows.setdefault(tool, {})[program] = mark
    programs = list(PROGRAMS)
    lines = [
        "# Programs of several ranks under every tool",
        "",
        f"Written by `python -m maintenance.sweeps.ranks`: {ranks} ranks on gloo, PyTorch "
        f"{torch.__version__}. Tools that only look leave losses as they are without tools, to "
        "the bit, in training and in evaluation after each step. Tools that decide have the masks "
        "and scales of one process with the whole batch, in all ranks; in bfloat16 they are the "
        "same in all ranks. What `replicas` compares is equal. `ids` are op ids and names of "
        "weights: those of one process, but for layers that are tensor "
        "parallel, where they are the same in all ranks, as are those of collectives.",
        "",
        "| tool | " + " | ".join(programs) + " |",
        "|---" * (len(programs) + 1) + "|",
        *(
            f"| {tool} | " + " | ".join(by.get(one, "") for one in programs) + " |"
            for tool, by in rows.items()
        ),
        "",
        "`=`: equal.",
        "",
        *(f"{number}. {text}" for text, number in notes.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the sweep, or one rank of it; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.sweeps.ranks")
    parser.add_argument("--work", nargs=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--tools", nargs="*", default=[])
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.work:
        rank, ranks, folder = options.work
        _work(int(rank), int(ranks), Path(folder), options.programs, options.tools)
    found = run(options.programs, options.tools, options.ranks, 3000)
    wrong = 0
    for program, tool, what in differences(found):
        wrong += what.startswith("WRONG")
        if what:
            print(f"{program}, {tool}: {what}")
    if options.page:
        options.page.write_text(_page(found, options.ranks))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
