"""Command line: `python -m maintenance.sweeps.onnx_models --only BERT`.

It prints a row for each model and each fault. With ``--write`` it makes the page of them.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy
import onnx
import onnxruntime
from onnx import numpy_helper

import amanda
from amanda_tools.prune import Prune

from .faults import found, line_of
from .models import MODELS, ROOT, Case, made

PAGE = ROOT / "docs" / "onnx-models.md"


def session_of(model: onnx.ModelProto, level: int = 0) -> Any:
    """Return a session that is quiet and uses one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel(level)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def same(one: Any, other: Any) -> bool:
    """Compare outputs bit for bit."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    same_type = one.dtype == other.dtype and one.shape == other.shape
    return bool(same_type and one.tobytes() == other.tobytes())


def watched(case: Case, level: int) -> tuple[bool, int]:
    """Run a model with routines that return None before and after each operator.

    Once they may edit, so that the model is cut, and once they observe outputs of one session.

    Returns:
        Whether all outputs are those of the plain session, bit for bit, and how many operators ran.
    """
    session, seen = session_of(case.model, level), list[str]()
    plain, found = session.run(None, case.inputs), list[Any]()
    for observe in (False, True):
        with amanda.apply(_looking(seen, observe)):
            found += [session.run(None, case.inputs) for _ in range(2)]
    return all(same(one, plain) for one in found), len(seen) // 4


def _looking(seen: list[str], observe: bool) -> amanda.Tool:
    tool = amanda.Tool()

    def look(context: Any) -> None:
        context.insert_before_op(lambda *values: seen.append(context.name), observe=observe)
        context.insert_after_op(lambda *values: None, observe=observe)

    tool.add_inst_for_op(look)
    return tool


def pruned_by_hand(case: Case, names: set[str]) -> onnx.ModelProto:
    """Return a model whose named weights have their smaller half set to zero."""
    new = onnx.ModelProto()
    new.CopyFrom(case.model)
    for one in new.graph.initializer:
        if one.name in names:
            array = numpy_helper.to_array(one)
            mask = numpy.ones_like(array)
            order = numpy.argsort(abs(array), axis=None, kind="stable")
            mask.reshape(-1)[order[: array.size // 2]] = 0
            one.CopyFrom(numpy_helper.from_array(array * mask, one.name))
    return new


def pruned(case: Case) -> tuple[bool, int]:
    """Compare a model under `prune`, what is exported of it, and one that is pruned by hand.

    Returns:
        Whether the outputs of all are the same bits, and how many weights are pruned.
    """
    session, tool = session_of(case.model), Prune(0.5)
    with amanda.apply(tool):
        found = [session.run(None, case.inputs) for _ in range(2)]
    names = {weight.name for weight in tool.result().weights}
    expected = session_of(pruned_by_hand(case, names)).run(None, case.inputs)
    if not names:
        return all(same(one, expected) for one in found), 0
    new = amanda.exported(session, tool, case.inputs)
    found.append(session_of(new).run(None, case.inputs))
    return all(same(one, expected) for one in found), len(names)


def row(name: str) -> tuple[list[str], bool]:
    """Return what the page says of a model, and whether all of it is as it should be."""
    case = made(name)
    plain, count = watched(case, 0)
    basic, _ = watched(case, 1)
    as_by_hand, weights = pruned(case)
    folds = any(node.op_type == "BatchNormalization" for node in case.model.graph.node)
    by_hand = f"{_said(as_by_hand)}, {weights} weights" if weights else "no weights"
    cells = [name, str(count), _said(plain), _said(basic), by_hand]
    return cells, plain and as_by_hand and (basic or folds)


def _said(same_bits: bool) -> str:
    return "equal" if same_bits else "differs"


def main() -> int:
    """Run models and faults, and return 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.sweeps.onnx_models")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--no-faults", action="store_true", help="no faults in exported models")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    failed, rows = False, list[list[str]]()
    for name in MODELS:
        if options.only in name:
            try:
                cells, right = row(name)
            except Exception as error:
                cells, right = [name, f"{type(error).__name__}: {error}"[:500]], False
            failed |= not right
            rows.append(cells)
            print(f"| {' | '.join(cells)} |{'' if right else ' FAILED'}", flush=True)
    told = {} if options.no_faults else found()
    for fault, (named, right) in told.items():
        failed |= not right
        print(f"| {fault} | {named} |{'' if right else ' FAILED'}", flush=True)
    if options.write and not failed:
        PAGE.write_text(_page(rows, told))
    return int(failed)


def _page(rows: list[list[str]], told: dict[str, tuple[str, bool]]) -> str:
    versions = f"ONNX Runtime {onnxruntime.__version__}, ONNX {onnx.__version__}"
    faults = [
        f"| {fault} | `{line_of(fault)}` | `{named}` |"
        for fault, (named, _) in told.items()
        if fault != "none"
    ]
    models = [f"| {' | '.join(cells)} |" for cells in rows]
    return _TEXT.format(
        versions=versions, models="\n".join(models), count=len(faults), faults="\n".join(faults)
    )


_TEXT = """# Models of ONNX under tools

This page is made by `python -m maintenance.sweeps.onnx_models --write`, with {versions}. Weights
are random, from a seed. Models of `transformers` and `keras` are small configurations that
PyTorch's exporter wrote.

## Watching changes nothing, and pruning is what it says

A tool inserts routines that return None before and after each operator. They are inserted as
routines that may edit, for which the model is cut, and as observers, which see extra outputs of one
session. The outputs of two runs of each are compared bit for bit with the plain session, not
optimised (`ORT_DISABLE_ALL`) and with `ORT_ENABLE_BASIC`. There ONNX Runtime folds a
BatchNormalization into a Conv, which a tool between them prevents: such a model differs in the last
bits.

In the last column the model runs under `prune` with a sparsity of 0.5. Its outputs, and those of
the model that `amanda.exported` returns, are compared bit for bit with a model in whose file the
smaller half of each of the same weights was set to zero.

| model | executions of operators | not optimised | basic optimisations | pruned |
|---|---|---|---|---|
{models}

## Faults in an exported model

One network of PyTorch is exported, and a fault is planted in the exported model. Dumps of both are
compared by `amanda diff`, whose first operator must be that of the line with the fault. Without a
fault, nothing differs. It named all {count}:

| fault | line with the fault | named operator |
|---|---|---|
{faults}
"""


if __name__ == "__main__":
    sys.exit(main())
