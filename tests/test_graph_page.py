"""The page of a graph in a browser: errors, search, folding, details, keyboard, attacks.

Also its ONNX form in Netron.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.results import share
from amanda_tools.flops import Flops
from amanda_tools.graph import Graph, GraphResult, GraphTracing
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory

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
    return Page(browser)


class Page:
    """A page as a person uses it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def rows(self) -> list[str]:
        """Return the names of the rows of the tree, from the top."""
        script = "return [...document.querySelectorAll('#tree .name')].map((e) => e.textContent)"
        found: list[str] = self.browser.execute_script(script)
        return found

    def row(self, name: str) -> Any:
        """Return the row with this name."""
        path = f"//*[@id='tree']//li/div[span[contains(@class, 'name')][text()='{name}']]"
        return self.browser.find_element("xpath", path)

    def details(self) -> str:
        """Return the text on the right."""
        return str(self.browser.find_element("id", "details").text)

    def type(self, text: str) -> None:
        """Replace the text in the search box."""
        box = self.browser.find_element("id", "search")
        box.clear()
        box.send_keys(text)

    def press(self, *keys: str) -> None:
        """Press keys at the focus."""
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def problems(self) -> list[str]:
        """Return the messages on the console."""
        return [entry["message"] for entry in self.browser.get_log("browser")]


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


def test_modules_fold_and_open(page: Page) -> None:
    # 41 products, an addition, tanh and the sum; backward two of each product and parameter.
    title = page.browser.find_element("id", "title").text
    assert title.endswith(f": 44 operators, {41 * 4 + 3} backward")
    assert {"blocks", "head", "add", "tanh"} <= set(page.rows())
    assert "0" not in page.rows()
    page.row("blocks").click()
    opened = page.rows()
    assert [name for name in opened if name.isdigit()] == [str(n) for n in range(40)]
    page.row("7").click()
    assert page.rows()[opened.index("7") + 1] == "linear"
    page.row("blocks").click()
    assert "7" not in page.rows()
    page.row("blocks").click()
    assert page.rows() == opened
    page.browser.find_element("id", "close-all").click()
    assert page.rows().count("linear") == 0
    page.browser.find_element("id", "open-all").click()
    assert page.rows().count("linear") == 41


def test_search_and_details(page: Page) -> None:
    page.type("blocks.12 linear")
    assert page.rows() == ["blocks.12/linear"]
    assert page.browser.find_element("id", "found").text == "1 operator"
    page.row("blocks.12/linear").click()
    text = page.details()
    for part in (
        "blocks.12/linear", "float32[3,4]", "48 B", "blocks.12.weight", "float32[4,4]", "macs",
        "blocks.11/linear", "blocks.13/linear", "AddmmBackward0", "Backward operators", "source",
    ):  # fmt: skip
        assert part in text, part
    # A neighbour, then one of its backward operators, then the forward one again.
    find = page.browser.find_element
    find("xpath", "//article//button[text()='blocks.13/linear']").click()
    assert page.details().startswith("blocks.13/linear")
    find("xpath", "//article//button[text()='blocks.13/linear:AddmmBackward0']").click()
    assert page.details().startswith("blocks.13/linear:AddmmBackward0")
    assert find("id", "backward").is_selected()
    find("xpath", "//article//button[text()='blocks.13/linear']").click()
    chosen = find("css selector", "li[aria-selected=true]")
    assert chosen.is_displayed()
    assert "linear" in chosen.text
    # The picture's neighbours can be clicked as well.
    shown = page.browser.find_elements("css selector", "svg g[data-index]")
    assert len(shown) == 3 + 1 + 1
    page.type("nothing is called so")
    assert page.rows() == []


def test_figures_of_other_tools(browser: Any, tmp_path: Path) -> None:
    tools: dict[str, Any] = {
        "graph": GraphTracing(),
        "flops": Flops(),
        "latency": Latency(),
        "memory": Memory(),
    }
    with amanda.apply(*tools.values()):
        Classifier()(torch.ones(3, 4)).sum().backward()
    results = {name: tool.result() for name, tool in tools.items()}
    share(results)
    page = opened(browser, results["graph"], tmp_path)
    measure = support.Select(page.browser.find_element("id", "measure"))
    names = [option.text for option in measure.options]
    assert {"flops: macs", "latency: self", "memory: allocated"} <= set(names)
    bars = {}
    for name in ("flops: macs", "latency: self", "memory: allocated"):
        measure.select_by_visible_text(name)
        bars[name] = {
            module: page.row(module).find_element("css selector", ".bar span").text
            for module in ("blocks", "head")
        }
    # 40 products of (3, 4) by (4, 4), and one by (4, 2); float32.
    assert bars["flops: macs"] == {"blocks": "1.92 k", "head": "24"}
    assert bars["memory: allocated"]["blocks"] == "1.92 kB"
    for module, shown in bars["latency: self"].items():
        ops = (op for op in results["latency"].ops if op.phase == "forward")
        time = sum(op.self for op in ops if op.module.startswith(module))
        number, unit = shown.split()
        assert float(number) * {"ns": 1, "µs": 1e3, "ms": 1e6}[unit] == pytest.approx(
            time, rel=5e-3
        )
    page.type("head/linear")
    page.row("head/linear").click()
    assert "memory: allocated 24 B" in page.details()
    assert page.problems() == []


def test_the_largest_graph_comes_first(browser: Any, result: GraphResult, tmp_path: Path) -> None:
    page = opened(browser, GraphResult([Graph("other/1/eager"), *result.graphs]), tmp_path)
    assert page.browser.find_element("id", "title").text.startswith("pytorch/")
    choice = support.Select(page.browser.find_element("id", "graph"))
    assert next(option.text for option in choice.options) == "other/1/eager"
    assert choice.first_selected_option.text == result.graph.namespace
    measure = support.Select(page.browser.find_element("id", "measure"))
    assert [option.text for option in measure.options][2:] == ["macs"]
    choice.select_by_visible_text("other/1/eager")
    assert page.browser.find_element("id", "title").text.startswith("other/1/eager: 0 operators")
    assert [option.text for option in measure.options][2:] == []
    assert page.problems() == []


def test_parameters_have_their_readers(page: Page) -> None:
    page.type("head/linear")
    page.row("head/linear").click()
    page.browser.find_element("xpath", "//article//button[text()='head.weight']").click()
    assert "parameter" in page.details()
    assert "Read by\nhead/linear" in page.details()


def test_the_keyboard_is_enough(page: Page) -> None:
    page.browser.find_element("tag name", "body").send_keys("/")
    assert page.browser.switch_to.active_element.get_attribute("id") == "search"
    page.press("tanh", "\ue007")  # Enter
    assert page.details().startswith("tanh")
    page.type("")
    page.press("\ue00c")  # Escape
    page.press("\ue015")  # Down, into the tree
    before = page.rows()
    page.press("\ue010")  # End
    page.press("\ue013")  # Up
    page.press("\ue011", "\ue015")  # Home, Down: the first module
    page.press("\ue014")  # Right
    assert len(page.rows()) > len(before)
    page.press("\ue012")  # Left
    assert page.rows() == before
    page.press("\ue00d")  # Space
    assert len(page.rows()) > len(before)


def test_bars_follow_the_measure(page: Page) -> None:
    select = support.Select(page.browser.find_element("id", "measure"))
    assert [option.text for option in select.options] == ["size of outputs", "executions", "macs"]
    select.select_by_visible_text("macs")
    assert page.browser.find_element("css selector", "#tree .bar").text == "2.112 k"  # 44 * 48
    select.select_by_visible_text("executions")
    assert page.browser.find_element("css selector", "#tree .bar").text == "44"


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
    page.browser.find_element("id", "open-all").click()
    for number, text in enumerate(HOSTILE):
        row = page.browser.find_elements("css selector", "#tree li[data-index]")[number]
        row.find_element("css selector", ".row").click()
        heading = page.browser.execute_script("return document.querySelector('h2').textContent")
        assert heading == text
    assert page.browser.execute_script("return window.broken") is None
    assert page.browser.find_elements("tag name", "img") == []
    assert page.problems() == []


def test_an_empty_graph(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, GraphResult(), tmp_path)
    assert page.browser.find_element("id", "title").text == "No operators were seen"
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
