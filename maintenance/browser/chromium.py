"""Opens Chromium without a window, and pages in it at a size and in a colour scheme."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

__all__ = ["SCHEMES", "messages", "next_frame", "open_browser", "resize", "show"]

SCHEMES = ("light", "dark")
#: Whether the data is unpacked and each chart is drawn. Charts are drawn when they come into view.
_DRAWN = """
const figures = [...document.querySelectorAll('figure')].filter((figure) => figure.draw);
for (const figure of figures) figure.draw();
return document.readyState === 'complete'
  && !document.querySelector('script[data-encoding]')
  && figures.every((figure) => figure.querySelector('.chart').childElementCount > 0);
"""


def open_browser() -> Any:
    """Open Chromium without a window; CHROME may name it. It reaches no network."""
    programs = ("chromium", "chromium-browser", "google-chrome", "chrome")
    chrome = os.environ.get("CHROME") or next(filter(None, map(shutil.which, programs)), None)
    driver = shutil.which("chromedriver")
    if chrome is None or driver is None:
        sys.exit("This needs chromium and chromedriver; CHROME may name the browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--hide-scrollbars", "--force-prefers-reduced-motion"]
    for flag in (*flags, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.set_script_timeout(120)
    # A page may remember the colours that it had before. There is no storage before the first page.
    forget = {"source": "try { localStorage.clear() } catch {}"}
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", forget)
    return browser


def resize(browser: Any, width: int, height: int, scale: float = 1) -> None:
    """Set the size of the screen, in pixels of CSS, and how many real ones are in each."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def show(browser: Any, address: str, scheme: str) -> None:
    """Open a page in a colour scheme and wait until all of it is drawn.

    Raises:
        TimeoutException: Something is not drawn after a time.
    """
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(address)
    WebDriverWait(browser, 20).until(lambda it: it.execute_script(_DRAWN), "not drawn")


def next_frame(browser: Any) -> None:
    """Wait until what was set is drawn, which is with the next frame."""
    frames = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
    browser.execute_async_script(frames)


def messages(browser: Any) -> list[str]:
    """Return what is on the console since the last call."""
    return [str(entry["message"]) for entry in browser.get_log("browser")]
