"""The formats of graphs, each read back by the program that it is for.

Long, since it is a list of formats.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import html.parser
import json
import math
import random
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import networkx
import pytest
import torch
from torch import nn

import amanda
from amanda_core.errors import MissingExtraError, ResultError
from amanda_core.results import HasResult, Result, share
from amanda_core.results.output import Output
from amanda_tools.flops import Flops
from amanda_tools.graph import (
    Edge,
    Graph,
    GraphResult,
    GraphTracing,
    Op,
    Source,
    dot as graph_dot,
    files,
    html as graph_html,
)
from amanda_tools.kit.tensors.types import TensorType
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.sparsity import Sparsity

from ..profiling import checked_trace

pytestmark = pytest.mark.one_interceptor

SCHEMA = json.loads(
    (Path(__file__).parents[3] / "docs" / "tools" / "graph.schema.json").read_text(encoding="utf-8")
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.split(torch.relu(self.norm(self.linear(x))), 2, dim=1)
        return torch.cat([b, a], dim=1).add_(1) + x


def traced(*formats: Any) -> GraphResult:
    tool = GraphTracing(formats=list(formats) or None)
    model, x = nn.Sequential(Block(), Block()), torch.rand(3, 4)
    with amanda.apply(tool):
        for _ in range(2):
            model(x).sum().backward()
    assert isinstance(tool, HasResult)
    return tool.result()


HOSTILE = [
    "</script><script>window.broken = 1</script>",
    '"><img src=x onerror="window.broken = 1">',
    "<!-- ]]> --> \u2028 \x1b[31m \u202e \x00 \\ ' \" ${x} {{x}} \\n",
    'x"]; evil -> n0; n0 [label="',
]


def hostile() -> GraphResult:
    """Return a graph whose every text is an attack."""
    graph = Graph(HOSTILE[0])
    graph.add(Source(0, "input", HOSTILE[1], TensorType("float32", (None, 3))))
    for number, text in enumerate(HOSTILE):
        facts: dict[str, Any] = {"id": 2**62 + number, "type": text, "word": text, "name": text}
        op = Op(**facts, module=f"a.{text}", source=text, namespace=text, index=0)
        op.arguments = {text: text}
        op.input_names = [text]
        op.inputs = [TensorType("float32", None)]
        op.outputs = [TensorType(text, (1, None)), [None, TensorType("int8", ())]]
        op.notes = {text: text, "bytes": 2**40, "share": 0.5}
        graph.add(op)
        graph.connect(Edge(number, 0, number + 1, 0))
    graph.connect(Edge(len(HOSTILE), None, 1, 0))
    return GraphResult([graph])


@pytest.fixture(scope="module", params=["traced", "hostile", "empty"])
def result(request: pytest.FixtureRequest) -> GraphResult:
    made = {"traced": traced, "hostile": hostile, "empty": GraphResult}[request.param]()
    assert isinstance(made, Result)
    return made


# JSON.


def test_json_is_what_the_schema_says_and_is_read_back(result: GraphResult, tmp_path: Path) -> None:
    data = json.loads(result.to_json())
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(data, SCHEMA)
    result.formats = ["json"]
    [file] = Output(tmp_path, ["graph"]).write("graph", result)
    again = files.load(file)
    assert [files.to_json(g) for g in again] == data_of(result)
    for one, other in zip(again, result.graphs, strict=True):
        assert [op.name for op in one.ops] == [op.name for op in other.ops]
        assert one.edges == other.edges


def data_of(result: GraphResult) -> list[dict[str, Any]]:
    return [files.to_json(graph) for graph in result.graphs]


WRONG: dict[str, Callable[[Any], Any]] = {
    "no object": lambda data: [],
    "no format": lambda data: {**data, "format": "amanda.flops/1"},
    "no graphs": lambda data: {**data, "graphs": None},
    "a list as graph": lambda data: {**data, "graphs": [[]]},
    "no nodes": lambda data: changed(data, ["graphs", 0, "nodes"], {}),
    "an unknown node": lambda data: changed(data, ["graphs", 0, "nodes", 0, "node"], "thing"),
    "a wrong index": lambda data: changed(data, ["graphs", 0, "nodes", 1, "index"], 7),
    "a text as id": lambda data: changed(data, ["graphs", 0, "nodes", 0, "id"], "7"),
    "a truth value as id": lambda data: changed(data, ["graphs", 0, "nodes", 0, "id"], True),
    "an unknown fact": lambda data: changed(data, ["graphs", 0, "nodes", 0, "extra"], 1),
    "a wrong shape": lambda data: changed(
        data, ["graphs", 0, "nodes", 0, "inputs"], [{"dtype": "float32", "shape": [1.5]}]
    ),
    "a wrong kind": lambda data: changed(data, ["graphs", 0, "edges", 0, "kind"], "rope"),
    "an edge from nowhere": lambda data: changed(data, ["graphs", 0, "edges", 0, "producer"], 99),
    "a negative node": lambda data: changed(data, ["graphs", 0, "edges", 0, "consumer"], -1),
    "a forward that is none": lambda data: changed(data, ["graphs", 0, "nodes", 0, "forward"], 99),
    "wrong calls": lambda data: changed(data, ["graphs", 0, "edges", 0, "calls"], [[1, 2, 3]]),
}


def changed(data: Any, path: list[Any], value: Any) -> Any:
    data = copy.deepcopy(data)
    at = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return data


def small() -> Any:
    graph = Graph("a/1/eager")
    graph.add(Op(1, "t", None, "one", "", None, "a/1/eager", 0))
    graph.add(Source(1, "input", "x"))
    graph.connect(Edge(1, 0, 0, 0, calls=[(0, 0)]))
    return json.loads(GraphResult([graph]).to_json())


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_graph_is_an_error_that_says_where(name: str, tmp_path: Path) -> None:
    files.from_json(small())
    data = WRONG[name](small())
    with pytest.raises(ResultError, match="The graph cannot be read"):
        files.from_json(data)
    problems = list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(data))
    assert bool(problems) == (name in BY_SCHEMA)
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ResultError, match=re.escape(str(file))):
        files.load(file)


#: What a schema can say; it cannot compare numbers with one another.
BY_SCHEMA = WRONG.keys() - {"a wrong index", "an edge from nowhere", "a forward that is none"}


def test_damaged_files_are_errors_or_graphs_and_nothing_else() -> None:
    text = json.dumps(small())
    generator = random.Random(0)
    read = 0
    for _ in range(2000):
        at = generator.randrange(len(text))
        damaged = (
            text[:at] + generator.choice('0-"[]{},:nte\\9') + text[at + generator.randrange(3) :]
        )
        try:
            data = json.loads(damaged)
        except ValueError:
            continue
        with contextlib.suppress(ResultError):
            for graph in files.from_json(data):
                read += 1
                graph.module_tree()
                graph.unrolled()
    assert read > 0


# networkx and tables.


def test_networkx() -> None:
    graph = traced().graph
    found = graph.to_networkx()
    assert len(found) == len(graph.nodes)
    assert found.number_of_edges() == len(graph.edges)
    forward = graph.to_networkx(backward=False, sources=False)
    assert sorted(forward) == [op.index for op in graph.ops]
    assert all(data["node"] == "op" for _, data in forward.nodes(data=True))
    without = networkx.MultiDiGraph(
        [(a, b) for a, b, data in found.edges(data=True) if not data["back"]]
    )
    assert networkx.is_directed_acyclic_graph(without)
    assert not networkx.is_directed_acyclic_graph(networkx.DiGraph(found))
    assert networkx.is_directed_acyclic_graph(graph.unrolled())


def test_module_tree() -> None:
    graph = traced().graph
    root = graph.module_tree()
    assert [module.path for module in root.walk()] == [
        "", "0", "0.linear", "0.norm", "1", "1.linear", "1.norm",
    ]  # fmt: skip
    assert sum(len(module.ops) for module in root.walk()) == len(graph.ops) + len(
        graph.backward_ops
    )
    linear = root.children["0"].children["linear"]
    assert {op.kind for op in linear.ops} >= {"linear", "linear_backward"}


@pytest.mark.slow
def test_table_and_data_frame() -> None:
    found = traced()
    table = found.table()
    rows = {row[0]: row[1:4] for row in table.rows}
    assert rows["linear"] == (2, 4, 4)  # The product and the transposed weight.
    assert rows["concat"] == (2, 4, 2)
    assert "<script" not in hostile()._repr_html_()
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = found.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(found.graph.ops) + len(found.graph.backward_ops)


def test_notes_of_other_tools() -> None:
    tracing, flops = GraphTracing(), Flops()

    class Timer(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.depends_on(tracing)
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context["graph_op"] is not None:  # The weights are made in here.
                context["graph_op"].notes["inputs"] = len(context.get_inputs())

    with amanda.apply(Timer(), flops):
        nn.Linear(4, 5)(torch.ones(2, 4))
    graph = tracing.result().graph
    graph.annotate(flops.result().op_figures())
    [linear] = [op for op in graph.ops if op.kind == "linear"]
    assert linear.notes == {"inputs": 3, "macs": 2 * 4 * 5, "backward macs": 0}


def test_figures_of_tools_that_ran_together() -> None:
    graph, flops, latency, memory = GraphTracing(), Flops(), Latency(), Memory()
    sparsity, nonfinite = Sparsity(), NonFinite()
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([-1.0, -1.0, -1.0, 1.0, math.nan]))
    with amanda.apply(graph, flops, latency, memory, sparsity, nonfinite):
        model(torch.ones(2, 4)).sum().backward()
    named: dict[str, Any] = {
        "flops": flops,
        "latency": latency,
        "memory": memory,
        "zeros": sparsity,
        "nan": nonfinite,
    }
    results = {name: tool.result() for name, tool in named.items()}
    found = graph.result()
    share({"graph": found, **results})
    assert not any(op.notes for op in graph.result().graph.ops)  # It is the result that has them.
    linear, relu = (next(op for op in found.graph.ops if op.kind == k) for k in ("linear", "relu"))
    assert linear.notes["flops: macs"] == 2 * 4 * 5
    # The gradient of the input is not wanted, that of the weight is.
    assert linear.notes["flops: backward macs"] == 2 * 4 * 5
    # (2, 5) in float32.
    assert linear.notes["memory: allocated (B)"] == relu.notes["memory: allocated (B)"] == 40
    assert linear.notes["zeros: zeros of the weight"] == 20
    assert relu.notes["zeros: zeros of the output"] == 2 * 3
    assert linear.notes["zeros: effective macs"] == 0
    assert "nan in step 0" in linear.notes.values()
    timed = {(op.name, op.phase): op for op in results["latency"].ops}
    for op in (*found.graph.ops, *found.graph.backward_ops):
        phase = "backward" if op.is_backward else "forward"
        assert op.notes["latency: self (s)"] == timed[op.name, phase].self / 1e9
    assert files.from_json(json.loads(found.to_json()))[0].ops[0].notes == found.graph.ops[0].notes


def test_figures_of_other_programs_are_left_out() -> None:
    graph, flops = GraphTracing(), Flops()
    with amanda.apply(graph):
        nn.Linear(4, 5)(torch.ones(2, 4))
    with amanda.apply(flops):
        nn.Sequential(nn.Linear(4, 5))(torch.ones(2, 4))
    found = graph.result()
    share({"graph": found, "flops": flops.result()})
    assert all(op.notes == {} for op in found.graph.ops)


# Trace files.

#: What Chrome's trace event format asks for, by the phase of an event; times in microseconds.
TRACE_SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {"traceEvents": {"type": "array", "items": {"$ref": "#/$defs/event"}}},
    "$defs": {
        "event": {
            "type": "object",
            "required": ["ph", "name", "pid", "tid", "ts"],
            "properties": {
                "ph": {"enum": ["X", "s", "f", "M"]},
                "name": {"type": "string"},
                "pid": {"type": "integer"},
                "tid": {"type": "integer"},
                "ts": {"type": "number", "minimum": 0},
            },
            "allOf": [
                {
                    "if": {"properties": {"ph": {"const": "X"}}},
                    "then": {
                        "required": ["dur", "args"],
                        "properties": {"dur": {"type": "number", "minimum": 0}},
                    },
                },
                {
                    "if": {"properties": {"ph": {"enum": ["s", "f"]}}},
                    "then": {"required": ["id", "cat"]},
                },
                {
                    "if": {"properties": {"ph": {"const": "f"}}},
                    "then": {"properties": {"bp": {"const": "e"}}, "required": ["bp"]},
                },
            ],
        }
    },
}


def test_a_trace_file_leads_from_forward_to_backward(tmp_path: Path) -> None:
    result = traced("trace")
    [path] = result.write(tmp_path)
    jsonschema.validate(json.loads(path.read_text()), TRACE_SCHEMA)
    events = checked_trace(path)
    graph = result.graph
    slices = [event for event in events if event["ph"] == "X"]
    ran = collections.Counter(event["args"]["node"] for event in slices)
    assert ran == {op.index: op.executions for op in (*graph.ops, *graph.backward_ops)}
    for event in slices:
        op = graph.nodes[event["args"]["node"]]
        assert isinstance(op, Op)
        assert (event["name"], event["args"]["id"]) == (op.name, op.id)
        assert event["cat"] == ("backward" if op.is_backward else "forward")

    flows: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
    # Each execution of a backward operator that has a forward one, once.
    with_forward = [op for op in graph.backward_ops if graph.forward_of(op)]
    assert len(flows) == sum(op.executions or 0 for op in with_forward)
    for flow in flows.values():
        assert flow["s"]["ts"] < flow["f"]["ts"]
        ends = [_at(slices, flow[phase]) for phase in "sf"]
        forward, backward = (graph.nodes[end["args"]["node"]] for end in ends)
        assert isinstance(forward, Op)
        assert isinstance(backward, Op)
        assert graph.forward_of(backward) is forward
        # Of the two steps, to the backward pass of the same.
        others = [
            one
            for one in slices
            if one["args"]["node"] == forward.index and ends[0]["ts"] < one["ts"] < ends[1]["ts"]
        ]
        assert others == []


def _at(slices: list[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any]:
    """Return the slice at the start or end of an arrow."""
    [found] = [one for one in slices if (one["tid"], one["ts"]) == (event["tid"], event["ts"])]
    return found


def test_times_of_a_profiler_and_loops(tmp_path: Path) -> None:
    tracing, latency = GraphTracing(formats=["trace"]), Latency()
    layer = nn.Linear(3, 3)
    with amanda.apply(latency, tracing):
        x: Any = torch.ones(2, 3)
        for _ in range(3):
            x = layer(x)
        x.sum().backward()
    result = tracing.result()
    # Backward, the last round is the first.
    [path] = result.write(tmp_path)
    events = checked_trace(path)
    slices = [event for event in events if event["ph"] == "X"]
    starts = sorted(event["ts"] for event in slices if event["name"] == "linear")
    arrows = sorted(
        (
            (_at(slices, event)["ts"], event["id"])
            for event in events
            if event["ph"] == "s" and _at(slices, event)["name"] == "linear"
        ),
    )
    assert {start for start, _ in arrows} == set(starts)
    by_end = [
        (event["ts"], event["id"])
        for event in events
        if event["ph"] == "f" and _at(slices, event)["name"].startswith("linear:Addmm")
    ]
    order = [id for _, id in sorted(by_end)]
    assert [id for _, id in arrows if id in order] == order[::-1]
    # Those of another profiler do as well, and without any it is said.
    other = GraphResult(result.graphs, ["trace"], spans=latency.result().spans)
    assert len(other.write(tmp_path)) == 1
    with pytest.raises(ResultError, match=r"no times.*formats=\['trace'\]"):
        GraphResult(result.graphs, ["trace"]).write(tmp_path)


# The page.


class Page(html.parser.HTMLParser):
    """The elements of a page, and the contents of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.scripts and self.lasttag == "script":
            self.scripts[-1] += data


def test_the_page_is_one_file_and_holds_names_as_data(result: GraphResult) -> None:
    page, empty = Page(graph_html.page(result.graphs)), Page(graph_html.page([]))
    # Whatever the names are, the elements are those of an empty page.
    assert page.tags == empty.tags
    assert page.addresses == ["data:,"]
    assert page.scripts[1:] == empty.scripts[1:]
    data = json.loads(page.scripts[0])
    assert [graph["namespace"] for graph in data] == [graph.namespace for graph in result.graphs]
    for graph, own in zip(data, result.graphs, strict=True):
        names = [row[0 if len(row) > 4 else 1] for row in graph["nodes"]]
        assert [graph["texts"][name] for name in names] == [node.name for node in own.nodes]


# Graphviz, ONNX.


def test_dot(result: GraphResult, tmp_path: Path) -> None:
    for graph in result.graphs:
        text = graph_dot.dot(graph)
        # Outside of strings there are only nodes, edges and boxes: no text leaves its string.
        rest = re.sub(r'"(\\.|[^"\\])*"', '""', text).splitlines()
        facts = r'\[((label|fillcolor)=""|style=\w+|constraint=false|, )*\];'
        nodes = [line for line in rest if re.fullmatch(rf"n\d+ {facts}", line)]
        edges = [line for line in rest if re.fullmatch(rf"n\d+ -> n\d+ {facts}", line)]
        boxes = [line for line in rest if line == 'subgraph "" { label="";']
        modules = list(graph.module_tree().walk())
        assert (len(nodes), len(edges)) == (len(graph.nodes), len(graph.edges))
        assert len(boxes) == len(modules) - 1
        assert len(rest) == len(nodes) + len(edges) + 2 * len(boxes) + 4
    if shutil.which("dot") is None:
        pytest.skip("Graphviz' program 'dot' is not installed")
    result.formats = ["svg"]
    files = result.write(tmp_path)
    assert len(files) == len(result.graphs)
    for file, graph in zip(files, result.graphs, strict=True):
        picture = ElementTree.parse(file)
        groups = picture.findall(".//{http://www.w3.org/2000/svg}g")
        kinds = [group.get("class") for group in groups]
        assert kinds.count("node") == len(graph.nodes)
        assert kinds.count("edge") == len(graph.edges)


def test_drawing_without_graphviz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match="Install Graphviz"):
        graph_dot.draw(Graph("a/1/eager"), tmp_path / "graph.svg")
    # Before the program runs, and not behind it.
    with pytest.raises(MissingExtraError, match="Install Graphviz"):
        GraphTracing(formats=["svg"])


@pytest.mark.slow
def test_onnx(result: GraphResult, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    result.formats = ["onnx"]
    for file, graph in zip(result.write(tmp_path), result.graphs, strict=True):
        onnx.checker.check_model(str(file), full_check=True)
        model = onnx.load(str(file))
        assert {node.domain for node in model.graph.node} == {"amanda"}
        names = [node.name for node in model.graph.node]
        assert sorted(names) == sorted(op.name for op in graph.ops)
        read = {edge.producer for op in graph.ops for edge in graph.edges_into(op)}
        assert len(model.graph.input) == sum(source.index in read for source in graph.sources)
        shapes = [len(info.type.tensor_type.shape.dim) for info in model.graph.value_info]
        assert set(shapes) == ({2} if graph.namespace.startswith("pytorch") else set())


@pytest.mark.slow
def test_onnx_with_backward_operators(result: GraphResult, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    result.formats = ["onnx_backward"]
    for file, graph in zip(result.write(tmp_path), result.graphs, strict=True):
        onnx.checker.check_model(str(file), full_check=True)
        model = onnx.load(str(file))
        nodes = {node.name: node for node in model.graph.node}
        every = [*graph.ops, *graph.backward_ops]
        assert sorted(node.name for node in model.graph.node) == sorted(op.name for op in every)
        for op in graph.backward_ops:
            # What passes between two of them does so here.
            names = set(nodes[op.name].input)
            for edge in graph.edges_into(op):
                before = graph.nodes[edge.producer]
                if isinstance(before, Op) and not edge.back:
                    assert names & set(nodes[before.name].output)
            known = {one.name: one.s.decode() for one in nodes[op.name].attribute}
            forward = graph.forward_of(op)
            assert known.get("forward") == (forward.name if forward else None)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'networkx>=3'"):
        Graph("a/1/eager").to_networkx()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onnx>=1.16'"):
        GraphTracing(formats=["onnx"])


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="formats must be of json, html, dot"):
        GraphTracing(formats=["pdf"])  # type: ignore[list-item]


@pytest.mark.slow
def test_amanda_run(tmp_path: Path) -> None:
    pytest.importorskip("click", reason="amanda run is not installed")
    file = tmp_path / "network.py"
    file.write_text("import torch\ntorch.ones(2, 3) @ torch.ones(3)\n", encoding="utf-8")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "amanda",
            "run",
            "-t",
            "graph:formats=[html,dot]",
            "-o",
            "out",
            str(file),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "3 operators" in run.stderr
    assert {path.name for path in (tmp_path / "out" / "graph").iterdir()} == {
        "graph.html",
        "graph.dot",
    }
    [graph] = files.load(tmp_path / "out" / "graph.json")
    assert [op.name for op in graph.ops] == ["ones", "ones#2", "matmul"]
