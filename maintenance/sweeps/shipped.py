"""The tools of amanda-tools as the sweep applies them.

Tools that only look are applied all at once, which costs only one more run of each program. If that
run differs, each tool runs alone, so that the failure names the tool. Tools that edit are applied
one by one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amanda
from amanda_core.results import share
from amanda_tools import (
    capture,
    dump,
    effective_path,
    faults,
    fingerprint,
    flops,
    gating,
    graph,
    latency,
    memory,
    nonfinite,
    prune,
    quantize,
    rematerialize,
    replicas,
    rewriting,
    sensitivity,
    sparsity,
    steer,
    summary,
    trace,
)

if TYPE_CHECKING:  # It needs torch, which not all programs do that run under the tools.
    from .observations import Facts

Maker = Callable[[Path], amanda.Tool]

#: Entry point -> tool that changes nothing, with its default options and more.
LOOKING: Mapping[str, Maker] = {
    "capture": lambda folder: capture.Capture(["*"], ["*"], ["inputs", "outputs"], everything=True),
    "dump": lambda folder: dump.Dump(
        ["inputs", "weights", "outputs", "gradients"], stats=True, folder=folder
    ),
    "effective_path": lambda folder: effective_path.EffectivePath(),
    "fingerprint": lambda folder: fingerprint.Fingerprint(),
    "flops": lambda folder: flops.Flops(["matmul", "norm", "elementwise"]),
    "graph": lambda folder: graph.GraphTracing(),
    "latency": lambda folder: latency.Latency(),
    "memory": lambda folder: memory.Memory(),
    "nonfinite": lambda folder: nonfinite.NonFinite(),
    "replicas": lambda folder: replicas.Replicas(),
    "sensitivity": lambda folder: sensitivity.Sensitivity(),
    "sparsity": lambda folder: sparsity.Sparsity(gradients=True),
    "summary": lambda folder: summary.Summary(),
    "trace": lambda folder: trace.Trace(),
}
#: Those under which compiled callables stay compiled, without routines of the backward program.
LOOKING_FORWARD: Mapping[str, Maker] = {
    "dump": lambda folder: dump.Dump(["inputs", "weights", "outputs"], stats=True, folder=folder),
    "fingerprint": lambda folder: fingerprint.Fingerprint(backward=False),
    "flops": lambda folder: flops.Flops(["matmul", "norm", "elementwise"], backward=False),
    "graph": lambda folder: graph.GraphTracing(backward=False),
    "latency": lambda folder: latency.Latency(backward=False),
    "memory": lambda folder: memory.Memory(backward=False),
    "nonfinite": lambda folder: nonfinite.NonFinite(backward=False),
    "sensitivity": LOOKING["sensitivity"],
    "sparsity": lambda folder: sparsity.Sparsity(),
    "summary": LOOKING["summary"],
    "trace": LOOKING["trace"],
}
#: Tools that edit: two multiply by ones, the others compute the same result differently. Gates have
#: no neutral values, so their tools only look for where they would go.
EDITING: Mapping[str, Maker] = {
    "inject_faults": lambda folder: faults.InjectFaults(model="scale", amount=1.0, rate=0.1),
    "prune": lambda folder: prune.Prune(0.0),
    "prune_attention": lambda folder: gating.PruneAttention(layers=[]),
    "prune_channels": lambda folder: gating.PruneChannels(layers=[]),
    "prune_nm": lambda folder: prune.PruneNM(4, 4),
    "prune_positions": lambda folder: gating.PrunePositions(layers=[]),
    "prune_tiles": lambda folder: prune.PruneTiles(0.0),
    "quantize": lambda folder: quantize.Quantize(weights="none", calibration=10**9),
    "rematerialize": lambda folder: rematerialize.Rematerialize(0, strict=False),
    "rewrite": lambda folder: rewriting.Rewrite(["conv_bn", "sdpa", "softmax"]),
    "steer": lambda folder: steer.Steer("scale", factor=1.0, ops=["linear", "matmul", "conv*"]),
}
SHIPPED = {**LOOKING, **EDITING}

#: Tool that edits -> pattern of the error by which it refuses a program; such runs are listed.
REFUSALS: Mapping[str, str] = {
    "rematerialize": r"BudgetError: .*was written, or its memory freed, after",
}

#: The way in which all tools only look.
LOOKS = "tools"
#: Way to run a program -> its tools.
WAYS: Mapping[str, tuple[str, ...]] = {
    LOOKS: tuple(LOOKING),
    **{name: (name,) for name in EDITING},
}


@contextlib.contextmanager
def applied(way: str) -> Iterator[None]:
    """Apply the tools of a way, or a single tool, and create their results at the end.

    Args:
        way: A key of `WAYS` or `SHIPPED`.
    """
    makers = {name: SHIPPED[name] for name in WAYS.get(way, (way,))}
    with rendered(makers) as tools, amanda.apply(*tools):
        yield


@contextlib.contextmanager
def rendered(makers: Mapping[str, Maker]) -> Iterator[list[Any]]:
    """Make tools, and at the end their results in each form in which a user may ask for them."""
    with tempfile.TemporaryDirectory() as folder:
        tools: dict[str, Any] = {name: maker(Path(folder, name)) for name, maker in makers.items()}
        yield list(tools.values())
        results = {name: tool.result() for name, tool in tools.items() if hasattr(tool, "result")}
        share(results)
        for name, result in results.items():
            json.loads(result.to_json(), parse_constant=_no_json)
            str(result.table())
            result._repr_html_()
            if importlib.util.find_spec("pandas"):
                result.to_dataframe()
            if hasattr(result, "write"):
                result.write(Path(folder, f"{name} written"))


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def differing(way: str, plain: Facts, run: Callable[[str], Facts]) -> list[str]:
    """Return what differs in a run under the tools of a way, and which tool alone causes it.

    Args:
        way: A key of `WAYS`.
        plain: The facts of a plain run, with `error` if it raised.
        run: Runs the program under `applied` of its argument.
    """

    def compared(tools: str) -> list[str]:
        try:
            found = run(tools)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        return otherwise(tools, plain, found)

    names = compared(way)
    if not names or way in EDITING:
        return names
    alone = {name: compared(name) for name in WAYS[way]}
    return names + [
        f"{name} alone: {', '.join(found[:4])}" for name, found in alone.items() if found
    ]


def is_refusal(way: str, error: str) -> bool:
    """Return True if it is the error by which a tool that edits refuses a program."""
    return way in REFUSALS and bool(re.match(REFUSALS[way], error))


def otherwise(way: str, plain: Facts, found: Facts) -> list[str]:
    """Return what differs in the results; for tools that edit, only whether the run raised."""
    error = found.get("error", "")
    if is_refusal(way, error):
        return []
    if error != plain.get("error", ""):
        return [f"raised {error!r}"]
    from .observations import different

    # A program's modes see the operators that tools run, so compare only results.
    return [] if way in EDITING else different(plain, found, results_only=True)
