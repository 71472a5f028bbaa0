"""Make the pictures of reports: `nox -s screenshots`.

Runs each program of this folder under tools, opens its report in Chromium in light and dark, on a
wide and on a narrow screen, and fails if anything is on the browser's console. ``-- bert`` makes
those of one program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

HERE = Path(__file__).parent
TOOLS = ("latency", "memory", "flops", "graph")
#: Name -> program, and the operator whose details are shown on the wide screen.
PROGRAMS = {
    "resnet50": "resnet.encoder.stages.2.layers.0.layer.1.convolution/conv2d",
    "bert": "bert.encoder.layer.7.intermediate.dense/linear",
}
#: Width and height, and the pixels of the screen for each of them.
SIZES = {"wide": (1400, 900, 1), "narrow": (390, 844, 2)}
#: Section at the top of each picture.
PLACES = {"wide": "latency", "narrow": "memory"}
#: Colours of a picture, which keep its text sharp and the file small.
COLORS = 256
DRAWN = """
const figures = [...document.querySelectorAll('figure')];
for (const figure of figures) figure.draw();
return figures.every((figure) => figure.querySelector('.chart').childElementCount > 0);
"""


def main(names: list[str]) -> None:
    """Make the pictures of these programs, or of all."""
    if unknown := set(names) - set(PROGRAMS):
        sys.exit(f"There is no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    browser = open_browser()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in names or PROGRAMS:
                page = run(name, Path(folder))
                print(f"{name}: {page.stat().st_size / 1e6:.1f} MB")
                for scheme in ("light", "dark"):
                    for size in SIZES:
                        take(browser, page, name, scheme, size)
    finally:
        browser.quit()


def run(name: str, folder: Path) -> Path:
    """Run a program under tools; return its report."""
    page = folder / f"{name}.html"
    tools = [option for tool in TOOLS for option in ("-t", tool)]
    command = [sys.executable, "-m", "amanda", "run", "-q", *tools, "-o", str(folder / name)]
    subprocess.run([*command, "--html", str(page), f"{name}.py"], cwd=HERE, check=True)
    return page


def open_browser() -> Any:
    """Open Chromium without a window."""
    programs = ("chromium", "chromium-browser", "google-chrome", "chrome")
    chrome = os.environ.get("CHROME") or next(filter(None, map(shutil.which, programs)), None)
    driver = shutil.which("chromedriver")
    if chrome is None or driver is None:
        sys.exit("This needs chromium and chromedriver; CHROME may name the browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    for flag in (*flags, "--hide-scrollbars", "--force-prefers-reduced-motion"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def take(browser: Any, page: Path, name: str, scheme: str, size: str) -> None:
    """Take one picture."""
    width, height, scale = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(DRAWN))
    place = f"result-{PLACES[size]}"
    browser.execute_script("document.getElementById(arguments[0]).scrollIntoView()", place)
    if size == "wide":
        browser.execute_script("amanda.details.open({name: arguments[0]})", PROGRAMS[name])
    # What was set is drawn with the next frame.
    frames = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
    browser.execute_async_script(frames)
    file = HERE / f"{name}-{scheme}-{size}.png"
    browser.save_screenshot(str(file))
    picture = Image.open(file).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB")
    if messages := [entry["message"] for entry in browser.get_log("browser")]:
        sys.exit(f"On the console: {messages}")


if __name__ == "__main__":
    main(sys.argv[1:])
