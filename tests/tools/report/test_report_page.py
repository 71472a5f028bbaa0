"""The report in a browser: each chart is drawn and leads to its operators, by mouse and keyboard.

Also attacks by names, narrow screens, colours and printing. Anything on the console is a failure.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.diff import compare
from amanda_tools.dump import Dump
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.prune import Prune
from amanda_tools.report import report
from amanda_tools.sparsity import Sparsity
from amanda_tools.trace import Trace

from ..graph.test_graph_files import HOSTILE

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
support = pytest.importorskip("selenium.webdriver.support.ui", reason="selenium is not installed")
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
DOWN, RIGHT, ENTER, ESCAPE = "\ue015", "\ue014", "\ue007", "\ue00c"
#: Whether anything but one colour is on each canvas.
DRAWN = """
return [...document.querySelectorAll('figure')].map((figure) => {
  figure.draw();
  const canvas = figure.querySelector('canvas');
  if (!canvas) return figure.textContent.trim().length > 0;
  const copy = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  [copy.canvas.width, copy.canvas.height] = [canvas.width, canvas.height];
  copy.drawImage(canvas, 0, 0);
  const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
  const colors = new Set();
  for (let i = 0; i < data.length; i += 4) colors.add(data.slice(i, i + 4).join());
  return colors.size > 3;
});
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument("--window-size=1280,900")
    options.add_argument("--force-prefers-reduced-motion")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """A page as a person uses it."""

    def __init__(self, browser: Any, folder: Path, results: dict[str, Any], *more: Any) -> None:
        self.browser = browser
        file = folder / "report.html"
        file.write_text(report(results, *(more or ("train.py",))), encoding="utf-8")
        self.width()
        browser.get(file.as_uri())
        # Large data is decompressed after the page has loaded.
        packed = "return document.querySelectorAll('script[data-encoding]').length"
        support.WebDriverWait(browser, 60).until(lambda it: it.execute_script(packed) == 0)

    def width(self, pixels: int = 1280, scheme: str = "light") -> None:
        metrics = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def figure(self, title: str) -> Any:
        """Return the card of a chart, after it is drawn."""
        path = f"//figure[.//h3[text()='{title}']]"
        found = self.browser.find_element("xpath", path)
        self.run("arguments[0].scrollIntoView(); arguments[0].draw()", found)
        return found

    def press(self, element: Any, *keys: str) -> None:
        self.run("arguments[0].focus()", element)
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def details(self) -> str:
        """Return the text of the panel, or an empty string if it is closed."""
        return str(self.browser.find_element("id", "details").text)

    def problems(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.blocks(self.stem(x))).mean((2, 3))
        return torch.as_tensor(self.head(hidden))


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    tools: dict[str, Any] = {
        "latency": Latency(),
        "memory": Memory(),
        "flops": Flops(),
        "sparsity": Sparsity(),
        "nonfinite": NonFinite(),
        "prune": Prune(0.5),
        "trace": Trace(),
    }
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with amanda.apply(*tools.values()):
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3, 12, 12)).sum()
            loss = loss if step < 3 else torch.log(loss - loss)
            loss.backward()
            optimizer.step()
    return {name: json.loads(tool.result().to_json()) for name, tool in tools.items()}


@pytest.fixture
def page(browser: Any, results: dict[str, Any], tmp_path: Path) -> Iterator[Page]:
    page = Page(browser, tmp_path, results)
    yield page
    assert page.problems() == []


def test_every_chart_is_drawn(page: Page, results: dict[str, Any]) -> None:
    drawn = page.run(DRAWN)
    assert len(drawn) == sum(len(result["charts"]) for result in results.values())
    assert all(drawn), drawn
    assert page.browser.find_elements("css selector", ".problem") == []
    titles = [e.text for e in page.browser.find_elements("css selector", "section > h2")]
    assert titles == ["Latency", "Memory", "FLOPs", "Sparsity", "Nonfinite", "Prune", "Trace"]


def test_an_operator_says_what_all_results_say_of_it(page: Page, results: dict[str, Any]) -> None:
    box = page.browser.find_element("id", "find")
    box.send_keys("blocks.1/conv2d", ENTER)
    said = page.details()
    [counted] = [op for op in results["flops"]["ops"] if op["name"] == "blocks.1/conv2d"]
    assert counted["macs"] == 4 * 2 * 100 * 8 * 8 * 9  # Four steps, two images, 10 x 10.
    for text in ("Latency", "Memory", "FLOPs", "Sparsity", "Prune", "Trace", "460.8 k", "float32"):
        assert text in said, text
    # To its gradient, and back.
    name = "blocks.1/conv2d:ConvolutionBackward0"
    page.browser.find_element("xpath", f"//aside//button[text()='{name}']").click()
    assert page.details().split("\n")[1:2] == [name]
    page.browser.find_element("xpath", "//aside//button[text()='blocks.1/conv2d']").click()
    page.press(page.browser.find_element("id", "details"), ESCAPE)
    assert page.details() == ""
    assert page.browser.switch_to.active_element.get_attribute("id") == "find"


def test_charts_are_used_by_keyboard(page: Page) -> None:
    figure = page.figure("MACs by module")
    canvas = figure.find_element("css selector", ".canvas")
    assert canvas.get_attribute("role") == "img"
    assert "MACs by module" in str(canvas.get_attribute("aria-label"))
    said = figure.find_element("css selector", ".said")
    page.press(canvas, DOWN)
    assert said.text.startswith("blocks: ")
    page.press(canvas, RIGHT)
    assert said.text.startswith("stem: ")
    page.press(canvas, ENTER)  # The module alone.
    assert figure.find_element("css selector", ".trail").text.startswith("the program / stem")
    page.press(canvas, DOWN, ENTER)  # Its operator.
    assert "stem/conv2d" in page.details()
    page.press(canvas, ESCAPE)
    assert not figure.find_element("css selector", ".trail").text.startswith("the program /")
    for title in ("Longest", "Zeros", "Speed"):
        figure = page.figure(title)
        canvas = figure.find_element("css selector", ".canvas")
        page.press(canvas, DOWN, RIGHT)
        name = figure.find_element("css selector", ".said").text.split(", ")[0]
        assert name
        page.press(canvas, ENTER)
        assert page.details().replace("\n", "")[1:].startswith(name), title


def test_charts_are_used_by_mouse(page: Page) -> None:
    chains = pytest.importorskip("selenium.webdriver.common.action_chains")
    figure = page.figure("Longest")
    canvas = figure.find_element("css selector", ".canvas")
    size = canvas.size
    at = (20, -size["height"] // 2 + 12)  # From the middle: names take less than the half of it.
    chains.ActionChains(page.browser).move_to_element_with_offset(canvas, *at).click().perform()
    first = page.details()
    assert "calls" in first
    # Another measure changes the bars.
    choice = support.Select(page.figure("At the peak").find_elements("tag name", "select")[0])
    assert [option.text for option in choice.options] == ["buffer", "operator", "layer", "type"]
    choice.select_by_visible_text("layer")


def test_tables_sort_and_lead_to_operators(page: Page, results: dict[str, Any]) -> None:
    section = page.browser.find_element("id", "result-latency")
    section.find_element("xpath", ".//summary[starts-with(text(), 'operators')]").click()
    # What is unfolded is filled after the click.
    wait = support.WebDriverWait(page.browser, 10)
    table = wait.until(lambda _: next(iter(section.find_elements("tag name", "table")), None))
    rows = len(table.find_elements("css selector", "tbody tr"))
    assert rows == 12
    section.find_element("css selector", ".more").click()
    assert len(table.find_elements("css selector", "tbody tr")) == len(results["latency"]["ops"])
    head = table.find_element("xpath", ".//th/button[text()='self']")
    for order in (-1, 1):
        page.run("arguments[0].click()", head)
        shown = [e.text for e in table.find_elements("css selector", "tbody td:first-child")]
        own = {op["name"]: op["self"] for op in results["latency"]["ops"]}
        assert shown[0] == min(own, key=lambda name: order * own[name])
    page.run("arguments[0].click()", table.find_element("css selector", "tbody button"))
    assert shown[0] in page.details().replace("\n", "")


def test_the_first_fault_comes_first(page: Page) -> None:
    page.run(DRAWN)
    tile = page.browser.find_element("css selector", "#result-nonfinite .tile")
    assert tile.text.split("\n")[:2] == ["log", "the first fault"]
    page.run("arguments[0].click()", tile)
    assert "inf" in page.details()


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_nothing_is_wider_than_the_screen(page: Page, width: int) -> None:
    page.width(width)
    page.run(DRAWN)
    page.run("for (const one of document.querySelectorAll('details')) one.open = true")
    widest = (
        "return Math.max(...[...document.querySelectorAll('main, canvas, header, figure')].map("
    )
    assert page.run(f"{widest}(e) => e.getBoundingClientRect().right))") <= width
    assert page.run("return document.documentElement.scrollWidth") <= width


#: Texts on the canvases that are partly beyond their edges.
CUT = """
return [...document.querySelectorAll('figure .canvas')].flatMap((host) => {
  const zr = echarts.getInstanceByDom(host).getZr();
  return zr.storage.getDisplayList().filter((one) => {
    // The pages of a legend are clipped to the one that is seen.
    if (one.type !== 'tspan' || one.invisible || (one.__clipPaths || []).length) return false;
    const box = one.getBoundingRect().clone();
    if (one.transform) box.applyTransform(one.transform);
    return box.x < -1 || box.y < -1 || box.x + box.width > zr.getWidth() + 1 ||
      box.y + box.height > zr.getHeight() + 1;
  }).map((one) => `${host.getAttribute('aria-label')}: ${one.style.text}`);
});
"""


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_no_text_of_a_chart_is_cut_off(browser: Any, tmp_path: Path, width: int) -> None:
    model = nn.Sequential()
    for n in range(4):
        inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        inner = nn.Sequential(nn.Sequential(nn.Sequential(inner)))
        model.add_module(f"a_stage_with_quite_a_long_name_{n}", inner)
    model.add_module("W" * 120, nn.Linear(8, 2))
    tools: list[Any] = [Latency(), Memory(), Flops(), Sparsity(), NonFinite(norms=True), Trace()]
    with amanda.apply(*tools):
        for _ in range(3):
            model(torch.ones(3, 8)).sum().backward()
            amanda.step()
    results = {f"tool{n}": json.loads(tool.result().to_json()) for n, tool in enumerate(tools)}
    page = Page(browser, tmp_path, results)
    page.width(width)
    assert all(page.run(DRAWN))
    page.run("for (const one of document.querySelectorAll('figure')) one.scrollIntoView()")
    assert page.run(CUT) == []
    assert page.problems() == []


def test_the_line_of_a_divergence_is_at_the_first_tensor_that_differs(
    browser: Any, tmp_path: Path
) -> None:
    """Not at an equal one of the same operator; and what is equal is at zero."""
    norm, dumps = nn.BatchNorm1d(3), []
    model = nn.Sequential(nn.Linear(4, 3), norm, nn.ReLU()).eval()
    for eps in (1e-5, 1e-3):
        norm.eps, tool = eps, Dump(values=["inputs", "outputs"])
        with amanda.apply(tool):
            model(torch.ones(2, 4))
        dumps.append(tool.result().open())
    result = json.loads(compare(dumps[0], dumps[1]).to_json())
    row = next(n for n, one in enumerate(result["compared"]) if not one["difference"]["within"])
    assert result["compared"][row - 1]["a"]["name"] == result["first"]["a"]["name"]
    page = Page(browser, tmp_path, {"diff": result})
    assert all(page.run(DRAWN))
    lines, label = page.run(
        "const figure = [...document.querySelectorAll('figure')]"
        ".find((one) => one.textContent.includes('Where the runs diverge'));"
        "const chart = echarts.getInstanceByDom(figure.querySelector('.canvas')).getOption();"
        "return [chart.series.flatMap((one) => (one.markLine || {data: []}).data"
        ".map((line) => line.xAxis)), chart.yAxis[0].axisLabel.formatter(chart.yAxis[0].min)]"
    )
    assert (lines, label) == ([row], "0")
    assert page.problems() == []


def test_colours_follow_the_system_and_the_button(page: Page) -> None:
    body = "return getComputedStyle(document.body).backgroundColor"
    page.run(DRAWN)
    light = page.run(body)
    page.width(1280, "dark")
    assert page.run(body) == "rgb(20, 23, 28)"
    button = page.browser.find_element("id", "scheme")
    button.click()
    assert (button.text, page.run(body)) == ("Colours: light", light)
    button.click()
    assert (button.text, page.run(body)) == ("Colours: dark", "rgb(20, 23, 28)")
    assert all(page.run(DRAWN))


def test_it_prints(page: Page) -> None:
    printed = page.browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 50_000
    assert all(
        page.run("return [...document.querySelectorAll('figure')].map((f) => !!f.textContent)")
    )


def test_hostile_names_are_only_shown(
    browser: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    texts = [text for text in HOSTILE if text.strip()]

    def spoiled(value: Any, number: int = 0) -> Any:
        """Return JSON in which names and sources are hostile."""
        if isinstance(value, list):
            return [spoiled(one, n) for n, one in enumerate(value)]
        if isinstance(value, dict):
            return {
                key: texts[number % len(texts)]
                if key in ("name", "module", "source", "type", "word") and isinstance(one, str)
                else spoiled(one, number)
                for key, one in value.items()
            }
        return value

    named = {f"{texts[0]}{name}": spoiled(result) for name, result in results.items()}
    page = Page(browser, tmp_path, named, texts[0], texts, texts[-1])
    page.run(DRAWN)
    page.run("for (const one of document.querySelectorAll('details')) one.open = true")
    for text in texts:
        page.run("amanda.details.open({name: arguments[0]})", text)
        heading = page.run("return document.querySelector('aside h2').textContent")
        assert heading == text
    assert page.run("return document.querySelector('h1').textContent") == texts[0]
    assert page.run("return window.broken") is None
    assert page.browser.find_elements("css selector", "img, iframe, object, a[href^=java]") == []
    assert page.problems() == []


def test_what_cannot_be_drawn_is_said_and_the_rest_is_there(browser: Any, tmp_path: Path) -> None:
    charts = [
        {"kind": "hologram", "title": "One"},
        {
            "kind": "bars",
            "title": "Two",
            "part": "nowhere",
            "measures": [{"label": "", "values": []}],
        },
        {
            "kind": "icicle",
            "title": "Three",
            "part": "ops",
            "measures": [{"label": "n", "values": ["n"]}],
        },
    ]
    ops = [{"name": "a/b", "module": "a", "n": 1}]
    odd = {"format": "x/1", "charts": charts, "ops": ops, "units": None, "notes": ["a note"]}
    page = Page(
        browser,
        tmp_path,
        {"odd": odd, "bare": {"format": "y/1", "numbers": [1, 2]}, "e": {"format": "e/1"}},
    )
    page.run(DRAWN)
    said = [e.text for e in page.browser.find_elements("css selector", "figure .problem")]
    assert len(said) == 2
    assert "hologram" in said[0]
    assert "nowhere" in said[1]
    assert page.figure("Three").find_elements("tag name", "canvas")
    # A result without charts is its tables, which are open.
    table = page.browser.find_element("css selector", "#result-bare table")
    assert [e.text for e in table.find_elements("tag name", "td")] == ["1", "2"]
    assert page.problems() == []


def test_a_run_that_ended_badly_and_without_results(browser: Any, tmp_path: Path) -> None:
    page = Page(browser, tmp_path, {}, "train.py", [], "Ended by ValueError: no")
    assert page.browser.find_element("css selector", "#facts .problem").text.endswith("no")
    assert "There are no results" in page.browser.find_element("id", "main").text
    assert page.problems() == []
