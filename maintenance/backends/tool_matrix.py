"""Every installed tool in every mode of every framework: docs/tools/matrix.md.

`python -m maintenance.backends.tool_matrix NAME` runs each cell of the frameworks that are
installed here, and writes `results/tools/NAME.json` and the page. A cell is what a tool did on a
small program whose numbers are NumPy's: what it found or changed is compared with a calculation by
hand. Where a tool says that it works is what `amanda tools` shows; the run has to agree.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import amanda
from amanda_core.interface.namespace import matches

from .one_tool import BACKENDS, FIRST, PRODUCTS, SECOND, Array, Run, X, expected, pruned

__all__ = ["CASES", "MODES", "PAGE", "RESULTS", "WORDS", "cells", "page", "record"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results") / "tools"
PAGE = ROOT / "docs/tools/matrix.md"
RUNS = 3
#: Whether PyTorch's interceptor is the one without C++; the results then go to a file of their own.
IN_PYTHON = os.environ.get("AMANDA_TORCH_INTERCEPTOR") == "function_mode"
HIDDEN = X @ FIRST
RELU = np.maximum(HIDDEN, 0)
OUTPUT = RELU @ SECOND
MACS = X.shape[0] * (FIRST.size + SECOND.size)

#: What a tool found, as its JSON says, and the outputs of the runs -> whether that is right.
Check = Callable[[Mapping[str, Any], Sequence[Array]], bool]


class Case(NamedTuple):
    """How a tool is tried.

    Attributes:
        make: Makes the tool, given an empty folder.
        check: Returns True if it did what it is for.
        changes: Whether outputs change.
        program: Which program; an empty text, or one that a mode has not, for the perceptron.
        factor: What the inputs are multiplied by.
    """

    make: Callable[[Path], Any]
    check: Check
    changes: bool = False
    program: str = ""
    factor: float = 1.0


def _tool(place: str, *arguments: Any, **options: Any) -> Callable[[Path], Any]:
    module, _, name = place.partition(":")
    return lambda folder: getattr(importlib.import_module(f"amanda_tools.{module}"), name)(
        *arguments, **options
    )


def _close(found: Iterable[Array], wanted: Array) -> bool:
    return all(np.allclose(one, wanted, rtol=1e-4, atol=1e-5) for one in found)


def _by_groups(weight: Array) -> Array:
    """Return a weight with the larger of each two inputs of an output."""
    pairs = np.abs(weight).reshape(-1, 2, weight.shape[1])
    kept = pairs >= pairs.max(1, keepdims=True)
    larger: Array = weight * kept.reshape(weight.shape)
    return larger


def _words(found: Mapping[str, Any]) -> list[str]:
    forward = [op for op in found["ops"] if op.get("phase", "forward") == "forward"]
    words = {(op["name"], op["word"]) for op in forward}
    return sorted(word for _, word in words if word in (*PRODUCTS, "relu"))


def _has_three(found: Mapping[str, Any]) -> bool:
    return [word == "relu" for word in _words(found)] == [False, False, True]


def _zeros(found: Mapping[str, Any]) -> bool:
    (relu,) = [one for one in found["tensors"] if one["word"] == "relu" and one["kind"] == "output"]
    return bool(relu["zeros"] == RUNS * (RELU == 0).sum() and relu["elements"] == RUNS * RELU.size)


#: Tool -> how it is tried. What is compared with is a closed form, or calculated by hand above.
CASES: dict[str, Case] = {
    "capture": Case(
        _tool("capture:Capture", [], ["relu"], ["outputs"]),
        lambda f, o: [one["shape"] for one in f["values"]] == [[5, 8]] * RUNS,
    ),
    "dump": Case(
        lambda folder: importlib.import_module("amanda_tools.dump").Dump(folder=folder),
        lambda f, o: [5, 8] in [one["shape"] for one in f["tensors"]],
    ),
    "effective_path": Case(
        _tool("effective_path:EffectivePath", cost=None),
        lambda f, o: {one["predicted"] for one in f["samples"]} == set(OUTPUT.argmax(1)),
        program="inference",
    ),
    "fingerprint": Case(_tool("fingerprint:Fingerprint"), lambda f, o: _all_values(f)),
    "flops": Case(_tool("flops:Flops"), lambda f, o: f["total"]["macs"] == RUNS * MACS),
    "graph": Case(
        _tool("graph:GraphTracing"),
        lambda f, o: _has_three(
            {"ops": [n for g in f["graphs"] for n in g["nodes"] if "word" in n]}
        ),
    ),
    "inject_faults": Case(
        _tool("faults:InjectFaults", list(PRODUCTS), model="zero", rate=1),
        lambda f, o: _close(o, 0 * OUTPUT),
        changes=True,
    ),
    "latency": Case(_tool("latency:Latency"), lambda f, o: _has_three(f)),
    "memory": Case(_tool("memory:Memory"), lambda f, o: _has_three(f)),
    "nonfinite": Case(
        _tool("nonfinite:NonFinite"),
        lambda f, o: f["faults"][0]["kind"] == "inf" and f["faults"][0]["origin"] == "operator",
        factor=1e38,
    ),
    "prune": Case(_tool("prune:Prune", 0.5), lambda f, o: _close(o, pruned()[0]), changes=True),
    "prune_attention": Case(
        _tool("gating:PruneAttention", block=4),
        lambda f, o: len(f["ops"]) == 2,
        changes=True,
        program="attention",
    ),
    "prune_channels": Case(
        _tool("gating:PruneChannels", 0.5),
        lambda f, o: f["ops"][0]["share"] == 0.5,
        changes=True,
        program="picture",
    ),
    "prune_nm": Case(
        _tool("prune:PruneNM", 1, 2),
        lambda f, o: _close(o, expected(_by_groups(FIRST), _by_groups(SECOND))[0]),
        changes=True,
    ),
    "prune_positions": Case(
        _tool("gating:PrunePositions"),
        lambda f, o: len(f["ops"]) == 2,
        changes=True,
        program="picture",
    ),
    "prune_tiles": Case(
        _tool("prune:PruneTiles", 0.5, tile=2),
        lambda f, o: 0.45 <= f["achieved"] <= 0.55,
        changes=True,
    ),
    "quantize": Case(
        _tool("quantize:Quantize"),
        lambda f, o: bool(0 < np.abs(o[-1] - OUTPUT).max() < 0.05 * np.abs(OUTPUT).max()),
        changes=True,
    ),
    "rematerialize": Case(
        _tool("rematerialize:Rematerialize", 0, strict=False), lambda f, o: _has_three(f)
    ),
    "replicas": Case(_tool("replicas:Replicas"), lambda f, o: _all_values(f)),
    "rewrite": Case(
        _tool("rewriting:Rewrite", ["conv_bn"], until="step"),
        lambda f, o: [one["rule"] for one in f["matches"]] == ["conv_bn"],
        changes=True,
        program="picture",
    ),
    "sensitivity": Case(
        _tool("sensitivity:Sensitivity"),
        lambda f, o: len(f["ops"]) == 2 and all(op["sqnr"] > 20 for op in f["ops"]),
    ),
    "sparsity": Case(_tool("sparsity:Sparsity"), lambda f, o: _zeros(f)),
    "steer": Case(
        _tool("steer:Steer", "scale", factor=2.0, ops=["relu"]),
        lambda f, o: _close(o, 2 * OUTPUT),
        changes=True,
    ),
    "summary": Case(_tool("summary:Summary"), lambda f, o: f["macs"] == MACS),
    "trace": Case(_tool("trace:Trace"), lambda f, o: _has_three(f)),
}


def _all_values(found: Mapping[str, Any]) -> bool:
    """Return True if each run has as many values, and all that the products and the ReLU have.

    A digest of a step depends on the order of its operators, which differs in graphs.
    """
    steps = collections.Counter(step["values"] for step in found["steps"] if step["values"])
    enough = sum(values * number for values, number in steps.items()) >= RUNS * 8
    return enough and all(number % RUNS == 0 for number in steps.values())


# Programs that are compiled, and those of tools that need more than a perceptron.


def _torch_programs() -> dict[str, Callable[[Array], Array]]:
    torch: Any = importlib.import_module("torch")
    nn = torch.nn

    class Picture(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.last = nn.Conv2d(4, 1, 3, padding=1)

        def forward(self, x: Any) -> Any:
            x = x.view(1, 1, *x.shape)
            return (x + self.last(self.norm(self.conv(x)).relu())).relu()

    class Layer(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.norm = nn.Linear(6, 18), nn.LayerNorm(6)

        def forward(self, x: Any) -> Any:
            q, k, v = (one[:, None] for one in self.qkv(x).chunk(3, -1))
            attention = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.norm(x + attention[:, 0])

    class Encoder(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Any) -> Any:
            x = x[None, :4].tile(1, 2, 1)
            for layer in self.layers:
                x = layer(x)
            return x

    perceptron = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    with torch.no_grad():
        for layer, weight in ((perceptron[0], FIRST), (perceptron[2], SECOND)):
            layer.weight.copy_(torch.tensor(weight.T))
    torch.manual_seed(0)
    modules = {"": perceptron, "picture": Picture().eval(), "attention": Encoder().eval()}

    def run_by(module: Any, learns: bool) -> Callable[[Array], Array]:
        def run(x: Array) -> Array:
            with torch.set_grad_enabled(learns):
                output = module(torch.tensor(x))
            if learns:
                output.sum().backward()
            found: Array = output.detach().numpy()
            return found

        return run

    compiled = {name: torch.compile(one, backend="aot_eager") for name, one in modules.items()}
    eager = {f"PyTorch, eager|{name}": run_by(m, not name) for name, m in modules.items()}
    return eager | {f"PyTorch, compiled|{name}": run_by(m, False) for name, m in compiled.items()}


def _tensorflow_programs() -> dict[str, Callable[[Array], Array]]:
    tf: Any = importlib.import_module("tensorflow")
    draw = np.random.default_rng(0).standard_normal
    filters = [draw(shape).astype(np.float32) for shape in ((3, 3, 1, 4), (3, 3, 4, 1))]
    scale, offset, mean = (draw(4).astype(np.float32) for _ in range(3))

    def infer(x: Any) -> Any:
        return tf.matmul(tf.nn.relu(tf.matmul(x, FIRST)), SECOND)

    def picture(x: Any) -> Any:
        x = tf.nn.conv2d(tf.reshape(x, (1, *X.shape, 1)), filters[0], 1, "SAME")
        normal = tf.compat.v1.nn.fused_batch_norm
        x, *_ = normal(x, scale, offset, mean, scale**2 + 1, is_training=False)
        return tf.nn.conv2d(tf.nn.relu(x), filters[1], 1, "SAME")

    def session_of(compute: Callable[[Any], Any]) -> Callable[[Array], Array]:
        with tf.Graph().as_default() as graph:
            given = tf.compat.v1.placeholder(tf.float32, X.shape)
            output = compute(given)

        def run(x: Array) -> Array:
            with tf.compat.v1.Session(graph=graph) as running:
                found: Array = running.run(output, {given: x})
            return found

        return run

    def called(compute: Callable[[Any], Any]) -> Callable[[Array], Array]:
        return lambda x: np.asarray(compute(tf.constant(x)))

    found = {}
    for name, compute in (("inference", infer), ("picture", picture)):
        found[f"TensorFlow, eager|{name}"] = called(compute)
        found[f"TensorFlow, tf.function|{name}"] = called(tf.function(compute))
        found[f"TensorFlow, session|{name}"] = session_of(compute)
    return found


def programs() -> dict[str, Callable[[Array], Array]]:
    """Return the programs of the frameworks that are installed here, by mode and program."""
    if IN_PYTHON:
        return {key: run for key, run in _torch_programs().items() if "eager" in key}
    found: dict[str, Callable[[Array], Array]] = {}
    for module, modes in BACKENDS.items():
        if importlib.util.find_spec(module) is None:
            continue
        if module == "torch":
            found.update(_torch_programs())
            continue
        weights: list[Any] = [FIRST, SECOND]
        if module == "jax":  # Held, as those of a model are.
            weights = [importlib.import_module("jax.numpy").asarray(one) for one in weights]
        for mode, run in modes().items():
            found[f"{mode}|"] = functools.partial(_output, run, weights)
        if module == "tensorflow":
            found.update(_tensorflow_programs())
    return found


def _output(run: Run, weights: Sequence[Any], x: Array) -> Array:
    return run(x, *weights)[0]


# Cells.


class _Namespaces(amanda.Tool):
    """Notes where products run; inserts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context["type"] in (*PRODUCTS, "conv2d"):
            self.found.add(context.namespace)


#: What a cell may say. Anything else is an error of a tool, of a driver or of this file.
WORDS = {
    "yes": "it works, as the run shows",
    "eagerly": "it works; what is compiled runs eagerly under it, operator by operator",
    "no": "it does not work there, and says so; the reasons are below",
}
#: A cell: one of `WORDS`, or what is wrong; and the reason if it is `no`.
Cell = tuple[str, str]


def cell(case: Case, run: Callable[[Array], Array], mode: str) -> Cell:
    """Return what a tool does with a program."""
    x = (X * case.factor).astype(np.float32)
    plain = run(x)
    where, outputs, refused, result = _Namespaces(), list[Array](), "", dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        tool = case.make(Path(folder, "made"))
        try:
            with amanda.apply(tool, where):
                for _ in range(RUNS):
                    outputs.append(run(x))
                    amanda.step()
        except amanda.AmandaError as error:
            refused = _why(error.what) or error.what
        else:
            result = json.loads(tool.result().to_json())
    if not np.array_equal(run(x), plain, equal_nan=True):
        return "wrong: something stays after the tool", ""
    declared = any(matches(one, found) for one in tool.works_on for found in where.found)
    refused = refused or _refusal(result)
    if tool.works_on and not declared:
        silent = not refused and bool(result.get("ops"))
        return ("wrong: it says nothing of this" if silent else "no"), refused or UNDECLARED
    if refused:
        return ("wrong: it says that it works here" if declared else "no"), refused
    same = all(np.array_equal(one, plain, equal_nan=True) for one in outputs)
    if same == case.changes:
        return "wrong: " + ("nothing changed" if same else "values changed"), ""
    try:
        right = case.check(result, outputs)
    except (LookupError, TypeError, ValueError):  # It has nothing of this kind.
        right = False
    if not right:
        return "wrong: not as by hand", ""
    compiled = mode.endswith(("compiled", "hybridized", "graph mode"))
    eagerly = compiled and any(found.endswith("/eager") for found in where.found)
    return "eagerly" if eagerly else "yes", ""


#: The reason where a tool only declares it, since nothing there would make it refuse.
UNDECLARED = "`amanda tools` leaves it out"


def _refusal(result: Mapping[str, Any]) -> str:
    return next(filter(None, map(_why, map(str, result.get("notes", ())))), "")


def _why(text: str) -> str:
    """Return the reason that follows "not supported on" a namespace; nothing without one."""
    found = re.search(r"\bnot supported on \S+: (.*)", text)
    return found[1] if found else ""


def cells() -> dict[str, dict[str, Cell]]:
    """Run every tool in every mode that is here; return mode -> tool -> cell."""
    found: dict[str, dict[str, Cell]] = {}
    here = programs()
    for mode in dict.fromkeys(key.partition("|")[0] for key in here):
        for name, case in CASES.items():
            run = here.get(f"{mode}|{case.program}") or here[f"{mode}|"]
            row = found.setdefault(mode + ", in Python" * IN_PYTHON, {})
            row[name] = cell(case, run, mode)
    return found


def record(name: str) -> list[str]:
    """Write the results of this environment; return what is wrong."""
    found = cells()
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (RESULTS / f"{name}.json").write_text(text + "\n", "utf-8")
    return [
        f"{mode}, {tool}: {word}"
        for mode, row in found.items()
        for tool, (word, _) in row.items()
        if word not in WORDS
    ]


# The page.

#: Modes in the order of the columns, with their headings.
MODES = {
    "PyTorch, eager": "PyTorch eager",
    "PyTorch, eager, in Python": "in Python",
    "PyTorch, compiled": "compiled",
    "TensorFlow, eager": "TensorFlow eager",
    "TensorFlow, tf.function": "function",
    "TensorFlow, session": "session",
    "JAX, eager": "JAX eager",
    "JAX, jit": "jit",
    "MXNet, imperative": "MXNet imperative",
    "MXNet, hybridized": "hybridized",
    "MindSpore, PyNative": "MindSpore PyNative",
    "MindSpore, graph mode": "graph mode",
    "ONNX Runtime": "ONNX Runtime",
}
HEAD = """\
# Which tool works where

Each cell was run: the tool on a small program in that mode, with numbers of NumPy. What the tool
finds or changes is compared with a calculation by hand, values that it must not change are compared
bit for bit, and so are those after it. A cell also has to agree with what `amanda tools` shows.

"""
TAIL = """
*In Python*: PyTorch's interceptor without a compiler. *Compiled*: `torch.compile` on the forward
pass, with its backend `aot_eager`. Programs train where the framework does, but for compiled ones.
ONNX Runtime only infers: there, tools look at forward passes.

A tool that works in a mode may lack a part of it there; its result and its [page](README.md) say
which. `prune_attention`, `prune_channels`, `prune_positions` and `rewrite` run on programs that
have what they look for where they work, and on a perceptron elsewhere.

This page is made by `nox -s backends` of `maintenance/backends/results/tools`; do not edit it.
"""


def page() -> str:
    """Return the page, of the results of all environments."""
    rows: dict[str, dict[str, Cell]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        rows.update(json.loads(file.read_text("utf-8")))
    modes = [mode for mode in MODES if mode in rows]
    lines = [f"| tool | {' | '.join(MODES[mode] for mode in modes)} |"]
    lines.append("|---" * (len(modes) + 1) + "|")
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in CASES:
        found = [rows[mode].get(name, ("not run", "")) for mode in modes]
        lines.append(f"| {_link(name)} | {' | '.join(word for word, _ in found)} |")
        for mode, (word, why) in zip(modes, found, strict=True):
            if word == "no":
                reasons.setdefault((name, why), []).append(mode)
    lines += ["", *(f"- *{word}*: {meaning}" for word, meaning in WORDS.items()), ""]
    lines += ["| tool | no in | why |", "|---|---|---|"]
    for (name, why), where in reasons.items():
        lines.append(f"| `{name}` | {'; '.join(where)} | {why} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


_PAGES = {"prune_attention": "gating", "prune_channels": "gating", "prune_positions": "gating"}
_PAGES["rewrite"] = "rewriting"


def _link(name: str) -> str:
    return f"[`{name}`]({_PAGES.get(name, name.replace('_', '-'))}.md)"


if __name__ == "__main__":
    problems = record(sys.argv[1])
    PAGE.write_text(page(), "utf-8")
    print("\n".join(problems) or "Every cell is as it should be.")
    sys.exit(bool(problems))
