"""`%%amanda` in IPython and in a Jupyter kernel, and the HTML of results."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.flops import Flops
from amanda_tools.kit.output.inline_charts import render_charts

pytestmark = pytest.mark.one_interceptor


@pytest.fixture
def shell() -> Iterator[Any]:
    testing = pytest.importorskip(
        "IPython.core.interactiveshell", reason="IPython is not installed"
    )
    shell = testing.InteractiveShell.instance()
    yield shell
    shell.clear_instance()


def run(shell: Any, cell: str) -> tuple[Any, list[dict[str, Any]], str]:
    from IPython.utils.capture import capture_output

    with capture_output() as captured:
        result = shell.run_cell(cell)
    return result, [output.data for output in captured.outputs], captured.stdout


CELL = """%%amanda flops sparsity
import torch
linear = torch.nn.Linear(3, 2)
linear(torch.ones(4, 3)).shape[0]"""


@pytest.mark.slow
def test_the_magic_runs_a_cell_under_tools(shell: Any) -> None:
    assert run(shell, "%load_ext amanda")[0].success
    result, outputs, _ = run(shell, CELL)
    assert (result.result, result.success) == (4, True)
    shown = [data["text/html"] for data in outputs if "text/html" in data]
    assert ["<h4>flops</h4>" in shown[0], "<h4>sparsity</h4>" in shown[1]] == [True, True]
    assert shell.user_ns["amanda_results"]["flops"].total.macs == 24
    # Outside of the cell nothing is counted.
    run(shell, "linear(torch.ones(4, 3))")
    assert shell.user_ns["amanda_results"]["flops"].total.macs == 24
    assert run(shell, CELL + ";")[0].result is None


@pytest.mark.slow
def test_a_cell_that_fails_shows_results_too(shell: Any) -> None:
    run(shell, "%load_ext amanda")
    result, outputs, text = run(shell, CELL.replace(".shape[0]", ".nothing"))
    assert isinstance(result.error_in_exec, AttributeError)
    assert "linear(torch.ones(4, 3)).nothing" in text  # The line of the cell.
    assert shell.user_ns["amanda_results"]["flops"].total.macs == 24
    assert any("<h4>flops</h4>" in data.get("text/html", "") for data in outputs)
    for line, error in (("", "No tool was given"), ("flopz", "flopz")):
        result, _, _ = run(shell, f"%%amanda {line}\n1")
        assert error in str(result.error_in_exec)


@pytest.mark.slow
def test_in_a_kernel() -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    cells = [nbformat.v4.new_code_cell(text) for text in ("%load_ext amanda", CELL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    found = [output["data"] for output in cells[1]["outputs"] if "data" in output]
    assert ["text/html" in data for data in found] == [True, True, False]
    assert found[-1]["text/plain"] == "4"


def test_charts_are_inline_and_escaped() -> None:
    tool = Flops()
    model = nn.ModuleDict({"<script>": nn.Linear(3, 2), "b&b": nn.Linear(2, 5)})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> Any:
            return self.parts["b&b"](self.parts["<script>"](x))

    with amanda.apply(tool):
        Whole()(torch.ones(4, 3))
    page = tool.result()._repr_html_()
    assert "<script" not in page
    assert "href" not in page
    drawings = re.findall(r"<svg.*?</svg>", page)
    assert len(drawings) == 2
    for drawing in drawings:
        ET.fromstring(drawing)  # Well-formed.
    bars = ET.fromstring(drawings[1])
    widths = [float(rect.get("width", "0")) for rect in bars.iter("rect")]
    assert widths[0] * 24 == pytest.approx(widths[1] * 40, rel=1e-2)
    assert any("<script>" in (text.text or "") for text in bars.iter("text"))
    # Two tables, with what both are about said once.
    assert (page.count("<table>"), page.count("<caption>")) == (2, 1)


def test_bars_of_nothing_are_left_out() -> None:
    measures = [{"label": "n", "values": ["n"]}]
    chart = {"kind": "bars", "title": "Most", "part": "ops", "measures": measures}
    rows = [{"name": "some", "n": 2}, {"name": "none", "n": 0}]
    page = render_charts({"charts": [chart], "ops": rows})
    assert "some" in page
    assert "none" not in page


def test_lines_over_steps() -> None:
    chart = {"kind": "lines", "title": "Steps", "part": "steps", "x": "n", "values": ["a", "b"]}
    rows = [{"n": number, "a": number * 1e6, "b": 1e6} for number in range(5)]
    page = render_charts({"charts": [chart], "steps": rows, "units": {"a": "ns"}})
    (drawing,) = re.findall(r"<svg.*?</svg>", page)
    first, second = ET.fromstring(drawing).iter("polyline")
    assert [point.split(",")[1] for point in (first.get("points") or "").split()] == [
        "120.0", "95.0", "70.0", "45.0", "20.0",
    ]  # fmt: skip
    assert {point.split(",")[1] for point in (second.get("points") or "").split()} == {"95.0"}
    assert "to 4 ms" in drawing
    # Kinds for pages only, and parts that are not there, draw nothing.
    assert render_charts({"charts": [{"kind": "graph", "title": "", "part": "x"}, chart]}) == ""
