"""The page of a graph in a browser: folding, search, details, keyboard, links, files, attacks.

Also its ONNX form in Netron. Long, since it is a list of what a reader may do.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import amanda
from amanda_core.results import share
from amanda_tools.flops import Flops
from amanda_tools.graph import Edge, Graph, GraphResult, GraphTracing, Op, Source, files
from amanda_tools.kit.output.rendering import render_json
from amanda_tools.kit.tensors.types import TensorType
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.report import report
from amanda_tools.sparsity import Sparsity

from .test_graph_files import HOSTILE, hostile

support = pytest.importorskip("selenium.webdriver.support.ui", reason="selenium is not installed")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
BROWSER = os.environ.get("CHROME") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.one_interceptor,
    pytest.mark.skipif(
        not (BROWSER and DRIVER),
        reason="no chromium or google-chrome with a chromedriver is installed",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument("--window-size=1280,800")
    # Netron wants to report to its makers.
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def opened(browser: Any, result: GraphResult, folder: Path) -> Page:
    result.formats = ["html"]
    [file] = result.write(folder)
    browser.get(file.as_uri())
    # Large data is decompressed after the page has loaded.
    loaded = "return Boolean(globalThis.amandaGraph.page)"
    support.WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(loaded))
    return Page(browser)


class Page:
    """A page as a person uses it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def script(self, text: str, *values: Any) -> Any:
        """Run a script; `page` is the page, `main` its first canvas, `box(id)` a box."""
        head = (
            "const lib = amandaGraph, page = lib.page, main = page.main;"
            "const box = (id) => main.tree.boxes.get(id);"
        )
        return self.browser.execute_script(head + text, *values)

    def boxes(self) -> list[str]:
        """Return the ids of the visible boxes, outermost first."""
        found: list[str] = self.script("return [...main.places.keys()].map((one) => one.id)")
        return found

    def element(self, name: str) -> Any:
        """Return the element of the box with this id, after moving it into view."""
        found = self.script(
            "const one = box(arguments[0]), place = main.places.get(one);"
            "if (main.view.scale < .5) main.view.zoom(.8 / main.view.scale);"
            "main.view.reach({...place, height: 50}); return main.elements.get(one);",
            name,
        )
        assert found is not None, name
        return found

    def toggle(self, name: str) -> None:
        """Fold or unfold a box by its handle."""
        self.element(name).find_element("css selector", ".handle").click()

    def click(self, name: str) -> None:
        """Click a box on its name."""
        self.element(name).find_element("css selector", ".body").click()

    def find(self, selector: str) -> Any:
        """Return the first element with a selector of CSS."""
        return self.browser.find_element("css selector", selector)

    def details(self) -> str:
        """Return the text on the right."""
        return str(self.find(".details").text)

    def link(self, name: str) -> None:
        """Click a name in the details."""
        self.browser.find_element("xpath", f"//article//button[.='{name}']").click()

    def choose(self, select: str, text: str) -> None:
        """Choose from one of the menus."""
        support.Select(self.find(f"select.{select}")).select_by_visible_text(text)

    def options(self, select: str) -> list[str]:
        """Return what one of the menus offers."""
        return [one.text for one in support.Select(self.find(f"select.{select}")).options]

    def type(self, text: str) -> None:
        """Replace the text in the search box."""
        box = self.find(".search")
        for keys in (CONTROL + "a", DELETE, text):
            box.send_keys(keys)

    def results(self) -> list[str]:
        """Return the names that the search has found."""
        found = self.browser.find_elements("css selector", ".results button .name")
        return [one.text for one in found]

    def active(self) -> str:
        """Return the id of the box with the focus."""
        return str(self.script("return document.activeElement.box?.id"))

    def press(self, *keys: str) -> None:
        """Press keys at the focus."""
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def counts(self) -> Counter[str]:
        """Return how much the page has done so far."""
        return Counter(self.script("return lib.counts"))

    def problems(self) -> list[str]:
        """Return the messages on the console."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


CONTROL, DELETE, DOWN, UP = "\ue009", "\ue017", "\ue015", "\ue013"
ENTER, ESCAPE, SPACE, HOME, END = "\ue007", "\ue00c", " ", "\ue011", "\ue010"


#: The boxes of a `Classifier` when all are folded, in the order of execution.
OUTERMOST = ["blocks/", "input blocks.0.input", "add", "head/", "tanh", "sum"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.blocks(x) + x))


@pytest.fixture(scope="module")
def result() -> GraphResult:
    tool = GraphTracing()
    model, x = Classifier(), torch.ones(3, 4)
    with amanda.apply(tool):
        model(x).sum().backward()
    for op in tool.result().graph.ops:
        tool.graphs[op.namespace].nodes[op.index].notes["macs"] = 48  # type: ignore[union-attr]
    return tool.result()


@pytest.fixture
def page(browser: Any, result: GraphResult, tmp_path: Path) -> Iterator[Page]:
    page = opened(browser, result, tmp_path)
    assert page.problems() == []
    yield page
    assert page.problems() == []


def test_modules_fold_and_unfold(page: Page) -> None:
    # 41 products, an addition, tanh and the sum; backward two of each product and parameter.
    title = page.find(".title").text
    assert title.endswith(f": 44 operators, {41 * 4 + 3} backward")
    assert page.boxes() == OUTERMOST
    blocks = page.element("blocks/")
    # 40 equal layers are one stack.
    assert blocks.find_element("css selector", ".times").text == "\u00d740"
    assert blocks.get_attribute("aria-expanded") == "false"
    page.toggle("blocks/")
    assert [name for name in page.boxes() if name.startswith("blocks/")] == [
        "blocks/", *(f"blocks/{n}/" for n in range(40))
    ]  # fmt: skip
    assert page.element("blocks/").get_attribute("aria-expanded") == "true"
    page.toggle("blocks/7/")
    unfolded = page.boxes()
    assert unfolded[unfolded.index("blocks/7/") + 1] == "blocks.7/linear"
    page.toggle("blocks/")
    assert "blocks/7/" not in page.boxes()
    page.toggle("blocks/")
    assert page.boxes() == unfolded
    page.browser.find_element("xpath", "//button[.='Fold']").click()
    assert page.boxes() == OUTERMOST
    page.browser.find_element("xpath", "//button[.='Unfold']").click()
    assert sum(name.endswith("/linear") for name in page.boxes()) == 41


@pytest.mark.parametrize("kind", ["traced", "hostile"])
def test_the_page_has_the_facts_of_the_graph(
    kind: str, browser: Any, result: GraphResult, tmp_path: Path
) -> None:
    graphs = result.graphs if kind == "traced" else hostile().graphs
    page = opened(browser, GraphResult(graphs), tmp_path)
    for number, graph in enumerate(graphs):
        expected = files.to_json(graph)
        found = page.script(
            "const {nodes, edges, namespace} = page.graphs[arguments[0]];"
            "return {nodes, edges, namespace}",
            number,
        )
        for node in expected["nodes"]:
            node.pop("writes", None)
            node.pop("namespace", None)
            if "id" in node:
                node["id"] = str(node["id"])  # Larger than JavaScript's exact integers.
        expected = json.loads(render_json(expected))
        for edge in expected["edges"]:
            del edge["executions"], edge["calls"]
        assert found == expected


def test_boxes_do_not_overlap_and_edges_go_down(page: Page) -> None:
    page.script("main.unfoldAll()")
    places = page.script(
        "return [...main.places.values()].map((one) => [one.box.id, one.box.parent.id, "
        "one.x, one.y, one.width, one.height])"
    )
    by_id = {one[0]: one for one in places}
    for one in places:
        for other in places:
            if one is other or one[1] != other[1]:
                continue
            apart = (
                one[2] + one[4] <= other[2] or other[2] + other[4] <= one[2]
                or one[3] + one[5] <= other[3] or other[3] + other[5] <= one[3]
            )  # fmt: skip
            assert apart, (one, other)
        outer = by_id.get(one[1])
        if outer:
            assert outer[2] <= one[2]
            assert one[2] + one[4] <= outer[2] + outer[4]
            assert outer[3] <= one[3]
            assert one[3] + one[5] <= outer[3] + outer[5]
    order = [f"blocks/{n}/" for n in range(40)]
    heights = [by_id[name][3] for name in order]
    assert heights == sorted(heights)


def test_edges_are_summed_up_at_folded_boxes(page: Page, result: GraphResult) -> None:
    graph = result.graph

    def outermost(node: Op | Source) -> str:
        module = node.module if isinstance(node, Op) else ""
        return (
            f"{module.split('.')[0]}/"
            if module
            else ("" if isinstance(node, Op) else "input ") + node.name
        )

    expected: dict[tuple[str, str], set[tuple[int, int | None]]] = {}
    for edge in graph.edges:
        producer, consumer = graph.nodes[edge.producer], graph.nodes[edge.consumer]
        assert isinstance(consumer, Op)
        if consumer.is_backward or getattr(producer, "kind", "") in ("parameter", "constant"):
            continue
        ends = outermost(producer), outermost(consumer)
        if ends[0] != ends[1]:
            expected.setdefault(ends, set()).add((edge.producer, edge.output))
    found = page.script(
        "return lib.edgesAt(main.graph, main.tree, main.tree.root)"
        ".map((one) => [one.from.id, one.to.id, one.count])"
    )
    assert {(one, other): count for one, other, count in found} == {
        ends: len(values) for ends, values in expected.items()
    }
    assert ["input blocks.0.input", "add", 1] in found
    # Drawn as often.
    assert len(page.browser.find_elements("css selector", ".canvas path.edge")) == len(found)


def test_selection_lights_the_way_of_values(page: Page) -> None:
    page.toggle("blocks/")
    page.click("blocks/5/")
    lit = page.script(
        "return [...main.paths].filter(([, path]) => path.classList.contains('lit'))"
        ".map(([key]) => key.split('\\n'))"
    )
    assert lit == [["blocks/", "blocks/4/", "blocks/5/"], ["blocks/", "blocks/5/", "blocks/6/"]]
    page.click("add")
    lit = page.script(
        "return [...main.paths].filter(([, path]) => path.classList.contains('lit'))"
        ".map(([key]) => key.split('\\n'))"
    )
    # Out of the last block, to the addition; the input; and on to the head.
    assert sorted(lit) == [
        ["", "add", "head/"],
        ["", "blocks/", "add"],
        ["", "input blocks.0.input", "add"],
        ["blocks/", "blocks/39/", ""],
    ]
    near = page.script(
        "return [...main.elements].filter(([, one]) => one.classList.contains('neighbour'))"
        ".map(([box]) => box.id)"
    )
    assert sorted(near) == ["blocks/39/", "head/", "input blocks.0.input"]


def test_search_and_details(page: Page) -> None:
    page.type("blocks.12 linear")
    assert page.find(".found").text == "3 results"
    assert page.results()[0] == "blocks.12/linear"
    page.press(ENTER)
    text = page.details()
    for part in (
        "blocks.12/linear", "float32[3,4]", "48 B", "blocks.12.weight", "float32[4,4]", "macs",
        "blocks.11/linear", "blocks.13/linear", "AddmmBackward0", "Backward operators", "source",
    ):  # fmt: skip
        assert part in text, part
    # A neighbour, then one of its backward operators, then the forward one again.
    page.link("blocks.13/linear")
    assert page.details().startswith("blocks.13/linear")
    page.link("blocks.13/linear:AddmmBackward0")
    assert page.details().startswith("blocks.13/linear:AddmmBackward0")
    assert support.Select(page.find("select.direction")).first_selected_option.text == (
        "forward and backward"
    )
    page.link("blocks.13/linear")
    chosen = page.find("g[aria-selected=true]")
    assert chosen.is_displayed()
    assert "blocks.13/linear" in chosen.get_attribute("aria-label")
    page.type("nothing is called so")
    assert page.results() == []
    assert page.find(".found").text == "0 results"


def test_search_marks_the_boxes_that_hold_what_it_finds(page: Page) -> None:
    page.type("blocks.1 linear")
    # blocks.1 and blocks.10 to blocks.19; two of four backward operators name the operator.
    assert page.element("blocks/").find_element("css selector", ".badge").text == "11"
    assert "dimmed" in page.element("head/").get_attribute("class")
    page.toggle("blocks/")
    marked = page.script(
        "return [...main.elements].filter(([, one]) => one.classList.contains('holds-found'))"
        ".map(([box]) => box.id)"
    )
    assert marked == ["blocks/1/", *(f"blocks/{n}/" for n in range(10, 20))]
    page.press(ESCAPE)
    page.type("")
    assert page.browser.find_elements("css selector", ".holds-found, .dimmed, .badge") == []


def test_figures_of_other_tools(browser: Any, tmp_path: Path) -> None:
    tools: dict[str, Any] = {
        "graph": GraphTracing(),
        "flops": Flops(),
        "latency": Latency(),
        "memory": Memory(),
        "sparsity": Sparsity(),
    }
    model, x = Classifier(), torch.ones(3, 4)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    with amanda.apply(*tools.values()):
        model(x).sum().backward()
    results = {name: tool.result() for name, tool in tools.items()}
    share(results)
    page = opened(browser, results["graph"], tmp_path)
    assert {"flops: macs", "latency: self", "memory: allocated", "parameters"} <= {
        *page.options("color")
    }
    shown = {}
    for name in ("flops: macs", "latency: self", "memory: allocated", "parameters"):
        page.choose("color", name)
        shown[name] = {
            module: page.element(f"{module}/")
            .find_element("css selector", ".sub")
            .text.split(" · ")
            for module in ("blocks", "head")
        }
    # 40 products of (3, 4) by (4, 4), and one by (4, 2); float32.
    assert shown["flops: macs"] == {"blocks": ["1.92 k", "99 %"], "head": ["24", "1.2 %"]}
    assert shown["memory: allocated"]["blocks"][0] == "1.92 kB"
    assert shown["parameters"] == {"blocks": ["800", "99 %"], "head": ["10", "1.2 %"]}
    for module, [text, _] in shown["latency: self"].items():
        ops = (op for op in results["latency"].ops if op.phase == "forward")
        time = sum(op.self for op in ops if op.module.startswith(module))
        number, unit = text.split()
        assert float(number) * {"ns": 1, "µs": 1e3, "ms": 1e6}[unit] == pytest.approx(
            time, rel=5e-3
        )
    # Relative to the largest: the head has 24 of 1,920, the first of seven steps.
    page.choose("color", "flops: macs")
    heat = {
        name: page.element(name).get_attribute("class") for name in ("blocks/", "head/", "tanh")
    }
    assert "heat-7" in heat["blocks/"]
    assert "heat-1" in heat["head/"]
    assert "heat-0" in heat["tanh"]
    assert "1.92 k" in page.find(".legend").text
    assert "flops: macs 1.92 k" in page.element("blocks/").get_attribute("aria-label")
    # A share is not a sum: all values after the head are 0, and none before.
    page.choose("color", "share of zeros in outputs")
    subs = {
        name: page.element(name).find_element("css selector", ".sub").text for name in OUTERMOST
    }
    assert (subs["head/"], subs["add"], subs["blocks/"]) == (
        "100 %",
        "float32[3,4]",
        "40 operators, 1 each; 800 params, 3.2 kB",
    )
    page.click("head/")
    assert "memory: allocated\n24 B" in page.details().replace(" 24 B", "\n24 B")
    assert page.problems() == []


def test_the_largest_graph_comes_first(browser: Any, result: GraphResult, tmp_path: Path) -> None:
    page = opened(browser, GraphResult([Graph("other/1/eager"), *result.graphs]), tmp_path)
    assert page.find(".title").text.startswith("pytorch/")
    assert page.options("graph") == ["other/1/eager", result.graph.namespace]
    chosen = support.Select(page.find("select.graph")).first_selected_option
    assert chosen.text == result.graph.namespace
    assert page.options("color") == [
        "kind of operator",
        "macs",
        "size of outputs",
        "parameters",
        "size of parameters",
        "executions",
    ]
    page.choose("graph", "other/1/eager")
    assert page.find(".title").text.startswith("other/1/eager: 0 operators")
    page.type("x")
    page.press(ESCAPE)
    page.browser.find_element("xpath", "//button[.='Unfold']").click()
    assert page.options("color") == ["kind of operator"]
    assert page.problems() == []


def test_parameters_have_their_readers(page: Page) -> None:
    page.toggle("head/")
    page.click("head/linear")
    page.link("head.weight")
    assert "parameter" in page.details()
    assert "Read by\nhead/linear" in page.details()


def test_backward_operators_are_in_the_modules_of_their_forward_ones(page: Page) -> None:
    page.choose("direction", "backward")
    assert "blocks/" in page.boxes()
    names = [name for name in page.boxes() if name.startswith("head")]
    assert "head/linear:AddmmBackward0" in names
    assert "head/linear" not in names
    page.choose("direction", "forward and backward")
    assert {"forward:", "backward:"} <= {*page.boxes()}
    page.click("forward:head/")
    twins = page.script(
        "return [...main.elements].filter(([, one]) => one.classList.contains('counterpart'))"
        ".map(([box]) => box.id)"
    )
    assert twins == ["head/linear:AddmmBackward0", "head/linear:TBackward0"]


def test_the_keyboard_is_enough(page: Page) -> None:
    page.find("body").send_keys("/")
    assert "search" in page.browser.switch_to.active_element.get_attribute("class")
    page.press("tanh", ENTER)
    assert page.details().startswith("tanh")
    page.find("body").send_keys("/")
    page.press(ESCAPE)  # Out of the search, to the boxes.
    assert page.active() == "tanh"
    page.press(UP)
    assert page.active() == "head/"
    page.press(UP, UP)
    assert page.active() == "blocks/"
    page.press(UP)
    assert page.active() == "input blocks.0.input"
    page.press(DOWN)
    assert page.active() == "blocks/"
    page.press(ENTER)  # Unfold.
    assert "blocks/3/" in page.boxes()
    page.press(ENTER)  # Go in.
    assert page.active() == "blocks/0/"
    page.press(DOWN, DOWN)
    assert page.active() == "blocks/2/"
    assert page.details().startswith("blocks / 2")
    page.press(SPACE)
    assert "blocks.2/linear" in page.boxes()
    page.press(ESCAPE)  # Fold it again, then what it is in.
    assert "blocks.2/linear" not in page.boxes()
    assert page.active() == "blocks/2/"
    page.press(ESCAPE)
    assert "blocks/2/" not in page.boxes()
    assert page.active() == "blocks/"
    page.press(HOME)
    first = page.active()
    page.press(END)
    assert page.active() != first
    before = page.script("return main.view.scale")
    page.press("+", "+")
    assert page.script("return main.view.scale") == pytest.approx(before * 1.25**2)
    page.press("-")
    assert page.script("return main.view.scale") == pytest.approx(before * 1.25)
    # Each box says what it is.
    labels = page.script("return [...main.elements.values()].map((e) => e.ariaLabel)")
    assert any("40 operators, 1 each" in text and text.endswith(", stack") for text in labels)


def test_zoom_and_pan_with_the_mouse(page: Page) -> None:
    canvas = page.find("svg.canvas")
    before = page.script("return [main.view.x, main.view.y, main.view.scale]")
    chains = webdriver.ActionChains(page.browser)
    corner = canvas.size["width"] // 2 - 40, canvas.size["height"] // 2 - 200
    chains.move_to_element_with_offset(canvas, -corner[0], corner[1]).click_and_hold()
    chains.move_by_offset(60, 30).release().perform()
    moved = page.script("return [main.view.x, main.view.y, main.view.scale]")
    assert moved[0] == pytest.approx(before[0] - 60 / before[2], abs=1)
    assert moved[1] == pytest.approx(before[1] - 30 / before[2], abs=1)
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(canvas)
    webdriver.ActionChains(page.browser).scroll_from_origin(origin, 0, -100).perform()
    assert page.script("return main.view.scale") > before[2]
    # The minimap moves the view as well.
    page.find(".minimap").click()
    assert page.script("return [main.view.x, main.view.y]") != moved[:2]


def test_a_link_leads_to_the_same_place(page: Page) -> None:
    page.toggle("blocks/")
    page.toggle("blocks/7/")
    page.click("blocks.7/linear")
    page.choose("color", "macs")
    page.script("main.view.zoom(1.2)")
    page.script("page.write()")
    state = (
        "return [[...main.places.keys()].map((one) => one.id), main.selected.id, "
        "main.measure.name, main.view.scale, main.view.x, main.view.y]"
    )
    before, address = page.script(state), page.browser.current_url
    page.browser.get("about:blank")
    page.browser.get(address)
    after = page.script(state)
    assert after[:3] == before[:3]
    assert after[3:] == pytest.approx(before[3:], abs=1)
    # What does not exist is left out.
    page.browser.get("about:blank")
    page.browser.get(address.split("#")[0] + "#unfolded=nothing&select=x&view=a,b,c&direction=up")
    assert page.boxes() == OUTERMOST


def test_the_drawing_as_files(page: Page) -> None:
    page.toggle("blocks/")
    text = page.script("return lib.svgText(main).text")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert {"blocks", "head", "39", "tanh"} <= {*texts}
    # Colours stand in it, as no style sheet does.
    assert "var(" not in text
    # Names of unfolded boxes have a halo below them, not above.
    [caption] = [one for one in root.iter(f"{space}text") if one.text == "blocks"]
    assert "paint-order: stroke" in caption.attrib["style"]
    png = page.browser.execute_async_script(
        "const done = arguments[0]; amandaGraph.pngOf(amandaGraph.page.main, (blob) => {"
        "const reader = new FileReader(); reader.onload = () => done(reader.result);"
        "reader.readAsDataURL(blob); })"
    )
    content = base64.b64decode(png.partition(",")[2])
    assert content.startswith(b"\x89PNG\r\n")
    size = struct.unpack(">II", content[16:24])
    [wide, high] = (float(root.attrib[name]) for name in ("width", "height"))
    scale = min(2, 8000 / max(wide, high))
    assert size == pytest.approx((wide * scale, high * scale), abs=1)


def test_two_runs_side_by_side(page: Page, tmp_path: Path) -> None:
    class Other(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            del self.blocks[39]

    tool, model, x = GraphTracing(), Other(), torch.ones(3, 4)
    with amanda.apply(tool):
        model(x).sum().backward()
    file = tmp_path / "graph.json"
    file.write_text(tool.result().to_json(), encoding="utf-8")
    page.toggle("blocks/")
    page.find("input.file").send_keys(str(file))
    support.WebDriverWait(page.browser, 10).until(
        lambda _: page.script("return page.canvases.length") == 2
    )
    ids = "return page.canvases.map((one) => [...one.places.keys()].map((box) => box.id))"
    left, right = page.script(ids)
    # Both have the same stack, of the layers that both have.
    stack = "blocks/[blocks/0/\u2026blocks/38/]"
    assert stack in right
    assert {*left} - {*right} == {"blocks/39/"}
    assert {*right} <= {*left}
    marks = (
        "return page.canvases.map((one) => Object.fromEntries([...one.elements].map(([box, e]) =>"
        " [box.id, ['only', 'differs'].find((c) => e.classList.contains(c))])"
        ".filter(([, c]) => c)))"
    )
    after = {"blocks/": "differs", "head/": "differs", "tanh": "differs", "sum": "differs"}
    assert page.script(marks) == [after | {"blocks/39/": "only"}, after]
    page.toggle(stack)
    # Folding, selection and view go together.
    page.toggle("blocks/5/")
    assert "blocks.5/linear" in page.script(ids)[1]
    page.click("head/")
    assert page.script("return page.canvases.map((one) => one.selected.id)") == ["head/", "head/"]
    assert "Its operators or their shapes differ" in page.details()
    assert "+50 %" in page.details()  # Parameters: 10 and 15.
    heads = page.script(
        "return page.canvases.map((one) => { const {x, y, width} = one.places.get(one.selected);"
        " const {view} = one;"
        " return [(x + width / 2 - view.x) * view.scale, (y - view.y) * view.scale]; })"
    )
    assert heads[0] == pytest.approx(heads[1])
    page.choose("compare", "nothing")
    assert page.script("return page.canvases.length") == 1
    assert page.browser.find_elements("css selector", ".only, .differs") == []


def test_a_report_contains_the_canvas(browser: Any, result: GraphResult, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report({"graph": json.loads(result.to_json())}, "a run"), encoding="utf-8")
    browser.get(file.as_uri())
    found = support.WebDriverWait(browser, 20).until(
        lambda _: browser.find_elements("css selector", "figure g.box")
    )
    assert len(found) == len(OUTERMOST)
    stack = browser.find_element("css selector", "g.box.stack")
    stack.find_element("css selector", ".handle").click()
    assert len(browser.find_elements("css selector", "figure g.box")) == len(OUTERMOST) + 40
    browser.find_element("css selector", "figure .search").send_keys("tanh", ENTER)
    assert browser.find_element("css selector", "figure .details").text.startswith("tanh")
    # Keys belong to the canvas while it has the focus, and to the report otherwise.
    browser.find_element("css selector", "g.box[aria-selected=true]").click()
    browser.switch_to.active_element.send_keys("/")
    assert "search" in browser.switch_to.active_element.get_attribute("class")
    browser.find_element("id", "title").click()
    browser.find_element("tag name", "body").send_keys("/")
    assert browser.switch_to.active_element.get_attribute("id") == "find"
    wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    assert Page(browser).problems() == []


def test_a_file_that_is_no_graph_is_refused(page: Page, tmp_path: Path) -> None:
    for number, text in enumerate(["{", "[]", '{"format": "amanda.flops/1", "graphs": []}',
                                   '{"format": "amanda.graph/1", "graphs": []}',
                                   '{"format": "amanda.graph/1", "graphs": [{}]}']):  # fmt: skip
        file = tmp_path / f"{number}.json"
        file.write_text(text, encoding="utf-8")
        page.find("input.file").send_keys(str(file))
        said = f"{number}.json cannot be shown"
        support.WebDriverWait(page.browser, 10).until(
            lambda _, said=said: said in page.find(".said").text
        )
    assert page.script("return page.canvases.length") == 1


# Large graphs: what is done is counted, as times depend on the machine.


def large(layers: int, each: int, *, flat: bool = False) -> Graph:
    """Return a graph of layers with residual edges, or of one list of operators."""
    graph, tensor = Graph("pytorch/2/eager"), TensorType("float32", (8, 16))
    graph.add(Source(0, "input", "x", tensor))
    kinds = ("linear", "add", "layer_norm", "softmax", "gelu", "reshape")
    last = start = 0
    for layer in range(layers):
        for number in range(each):
            kind, path = kinds[number % 6], f"model.layers.{layer}.part{number // 6}"
            op = Op(
                id=len(graph.nodes), type=kind, word=kind, name=f"{path}/{kind}_{number}",
                module="" if flat else path, source=f"model.py:{number}",
                namespace=graph.namespace, index=0, executions=1,
            )  # fmt: skip
            op.inputs, op.outputs = [tensor], [tensor]
            op.notes = {"latency: self (s)": 1e-6 * (1 + layer % 5)}
            graph.add(op)
            graph.connect(Edge(last, 0, op.index, 0, executions=1))
            if number % 6 == 1:
                graph.connect(Edge(start, 0, op.index, 1, executions=1))
            elif number % 6 == 0:
                start = last
            last = op.index
    return graph


@pytest.mark.parametrize("flat", [False, True])
def test_seven_thousand_operators(flat: bool, browser: Any, tmp_path: Path) -> None:
    graph = large(1, 7000, flat=True) if flat else large(280, 25)
    page = opened(browser, GraphResult([graph]), tmp_path)
    first = page.counts()
    assert first["laidOut"] <= 40
    assert first["drawn"] <= 1000
    assert 1 <= len(page.boxes()) <= 40
    size = page.script("return page.index.text.length")
    # Each key: no layout, one pass over the index, at most 50 rows.
    for text in "linear_1":
        before = page.counts()
        page.find(".search").send_keys(text)
        done = page.counts() - before
        assert done["laidOut"] == done["layouts"] == 0
        assert done["scanned"] <= size
        assert done["drawn"] <= 50 * 4 + 3 * len(page.boxes())
        assert len(page.results()) <= 50
    before = page.counts()
    page.type("part layer model softmax_9 py:9")
    assert (page.counts() - before)["scanned"] <= 2 * size * len("part layer model softmax_9 py:9")
    page.type("")
    # Never more than 300 boxes, whatever is unfolded.
    page.script("main.unfoldAll()")
    assert 100 < len(page.boxes()) <= 300
    choices = random.Random(0)
    for _ in range(8):
        groups = page.script(
            "return [...main.places.keys()].filter((one) => one.children).map((one) => one.id)"
        )
        before = page.counts()
        page.script("main.toggle(box(arguments[0]), true)", choices.choice(groups))
        assert len(page.boxes()) <= 300
        assert (page.counts() - before)["laidOut"] <= 400
    # Colours and selection move nothing.
    before = page.counts()
    page.choose("color", "latency: self")
    page.script("main.select(main.tree.root.children[0])")
    assert (page.counts() - before)["laidOut"] == 0
    assert page.problems() == []


def test_each_operator_has_a_place_and_can_be_reached(browser: Any, tmp_path: Path) -> None:
    graph = large(30, 25)
    for op in graph.ops[-3:]:
        op.zone = "optimizer"
    page = opened(browser, GraphResult([graph]), tmp_path)
    indices = [node.index for node in graph.nodes]
    assert (
        page.script("return main.tree.leaves.map((one) => one.index).sort((a, b) => a - b)")
        == indices
    )
    most = page.script(
        "return Math.max(...[...main.tree.boxes.values()].map((b) => b.children?.length || 0))"
    )
    assert most <= 40
    for index in random.Random(1).sample(indices, 12):
        assert page.script(
            "page.reveal(arguments[0]); const place = main.places.get(main.selected);"
            "const {x, y, scale, size} = main.view;"
            "return place.x >= x && place.y >= y && place.x + place.width <= x + size.width / scale"
            " && place.y + place.height <= y + size.height / scale",
            index,
        )
    assert "(optimizer)/" in page.script("return [...main.tree.boxes.keys()]")


def test_loops_are_drawn(browser: Any, tmp_path: Path) -> None:
    graph, tensor = Graph("pytorch/2/eager"), TensorType("float32", (2,))
    for name in "abc":
        graph.add(Op(id=1, type="add", word="add", name=name, module="cell", source=None,
                     namespace=graph.namespace, index=0, outputs=[tensor]))  # fmt: skip
    for ends in ((0, 1), (1, 2), (2, 0), (1, 1)):
        graph.connect(Edge(ends[0], 0, ends[1], 0))
    page = opened(browser, GraphResult([graph]), tmp_path)
    page.script("main.toggle(box('cell/'), true)")
    edges = page.script(
        "return [...main.paths].map(([key, path]) => [...key.split('\\n').slice(1), "
        "path.classList.contains('back')])"
    )
    assert sorted(edges) == [["a", "b", False], ["b", "c", False], ["c", "a", True]]
    assert page.problems() == []


@pytest.mark.parametrize("size", [(390, 844), (1400, 900)])
def test_narrow_and_wide_screens(size: tuple[int, int], page: Page) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.browser.refresh()
        assert page.script("return document.documentElement.scrollWidth") <= size[0]
        assert page.script("return document.documentElement.scrollHeight") <= size[1]
        wide, high = page.script("return [main.svg.clientWidth, main.svg.clientHeight]")
        assert wide >= 0.65 * size[0]
        assert high >= 200
        page.click("tanh")
        assert page.details().startswith("tanh")
        page.toggle("blocks/")
        assert "blocks/3/" in page.boxes()
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_paper_gets_the_whole_drawing(page: Page) -> None:
    page.script("main.view.zoom(3)")
    page.script("dispatchEvent(new Event('beforeprint'))")
    bounds = page.script("return main.view.bounds")
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        # Also after the page has got the size of the paper.
        page.browser.execute_async_script("setTimeout(arguments[0], 200)")
        box = [float(n) for n in page.find("svg.canvas").get_dom_attribute("viewBox").split()]
        assert box == pytest.approx([-4, -4, bounds["width"] + 8, bounds["height"] + 8])
        assert page.find("svg.canvas").size["height"] > 500
        assert not page.find(".tools").is_displayed()
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page.script("dispatchEvent(new Event('afterprint'))")
    after = page.find("svg.canvas").get_dom_attribute("viewBox").split()
    assert float(after[3]) < box[3]


def test_dark_and_light(page: Page) -> None:
    colours = []
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        script = "return getComputedStyle(document.body).backgroundColor"
        colours.append(page.browser.execute_script(script))
    assert colours == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]


def test_hostile_names_are_only_shown(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, hostile(), tmp_path)
    page.script("main.unfoldAll()")
    for number, text in enumerate(HOSTILE):
        page.script("page.reveal(arguments[0])", number + 1)
        heading = page.browser.execute_script("return document.querySelector('h2').textContent")
        assert heading == text
    page.choose("color", page.options("color")[1])
    page.script("page.search.value = '<img'; page.find()")
    page.script("page.beside(page.graphs[0])")
    ElementTree.fromstring(page.script("return lib.svgText(main).text"))
    address = page.script("page.write(); return location.href")
    page.browser.get("about:blank")
    page.browser.get(address)
    assert page.browser.execute_script("return window.broken") is None
    assert page.browser.find_elements("tag name", "img") == []
    assert page.problems() == []


def test_an_empty_graph(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, GraphResult(), tmp_path)
    assert page.find(".title").text == "No operators were seen"
    assert page.problems() == []


def in_netron(browser: Any, file: Path) -> str:
    """Open a file in Netron; return an empty string, or Netron's complaint."""
    netron = pytest.importorskip("netron", reason="netron is not installed")
    address = netron.serve(str(file), address=("127.0.0.1", 0))
    try:
        browser.get("http://{}:{}/".format(*address))

        def ended(_: Any) -> str | None:
            body = browser.find_element("tag name", "body").get_attribute("class")
            if body == "default":
                return "drawn"
            for button in browser.find_elements("id", "message-button"):
                if not button.is_displayed():
                    continue
                if button.text != "Accept":
                    return str(browser.find_element("id", "message-text").text)
                button.click()  # A question about cookies, at the first visit.
            return None

        said = support.WebDriverWait(browser, 60).until(ended)
        return "" if said == "drawn" else str(said)
    finally:
        netron.stop(address)


@pytest.mark.parametrize("form", ["onnx", "onnx_backward"])
def test_netron_draws_the_operators(
    form: Any, browser: Any, result: GraphResult, tmp_path: Path
) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    result.formats = [form]
    [file] = result.write(tmp_path)
    assert in_netron(browser, file) == ""
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('#nodes > g.graph-node')].map("
        "(e) => [e.id.replace(/^node-name-/, ''), e.querySelector('text').textContent])"
    )
    graph = result.graph
    ops = [*graph.ops, *(graph.backward_ops if form == "onnx_backward" else ())]
    assert sorted(map(tuple, drawn)) == sorted((op.name, op.type) for op in ops)
    parameters = [source.name for source in graph.sources if source.kind == "parameter"]
    shown = browser.find_element("id", "nodes").text
    assert len(parameters) == 41 * 2
    assert all(name in shown for name in parameters)


def test_netron_says_what_is_wrong(browser: Any, result: GraphResult, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    result.formats = ["onnx"]
    [file] = result.write(tmp_path)
    file.write_bytes(file.read_bytes()[:300])
    assert "not onnx.ModelProto" in in_netron(browser, file)
