"""Make the pictures of reports: `nox -s screenshots`.

Runs each program of docs/screenshots under tools, opens its report in Chromium in light and dark,
on a wide and on a narrow screen, and fails if anything is on the browser's console. ``-- bert``
makes those of one program.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from . import chromium
from .reports import PICTURED, PROGRAMS, make

#: Name -> the operator whose details are shown on the wide screen.
OPERATORS = {
    "resnet50": "resnet.encoder.stages.2.layers.0.layer.1.convolution/conv2d",
    "bert": "bert.encoder.layer.7.intermediate.dense/linear",
}
#: Width and height, and the pixels of the screen for each of them.
SIZES = {"wide": (1440, 900, 1), "narrow": (390, 844, 2)}
#: Section at the top of each picture.
PLACES = {"wide": "latency", "narrow": "memory"}
#: Colours of a picture, which keep its text sharp and the file small.
COLORS = 256


def main(names: list[str]) -> None:
    """Make the pictures of these programs, or of all."""
    if unknown := set(names) - set(OPERATORS):
        sys.exit(f"There is no program {', '.join(unknown)}; there are {', '.join(OPERATORS)}")
    browser = chromium.open_browser()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in names or OPERATORS:
                page = make(name, PICTURED, Path(folder, f"{name}.html"))
                print(f"{name}: {page.stat().st_size / 1e6:.1f} MB")
                for scheme in chromium.SCHEMES:
                    for size in SIZES:
                        take(browser, page, name, scheme, size)
    finally:
        browser.quit()


def take(browser: Any, page: Path, name: str, scheme: str, size: str) -> None:
    """Take one picture."""
    chromium.resize(browser, *SIZES[size])
    chromium.show(browser, page.as_uri(), scheme)
    place = f"result-{PLACES[size]}"
    browser.execute_script("document.getElementById(arguments[0]).scrollIntoView()", place)
    if size == "wide":
        browser.execute_script("amanda.details.open({name: arguments[0]})", OPERATORS[name])
    chromium.next_frame(browser)
    file = PROGRAMS / f"{name}-{scheme}-{size}.png"
    browser.save_screenshot(str(file))
    picture = Image.open(file).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB")
    if found := chromium.messages(browser):
        sys.exit(f"On the console: {found}")


if __name__ == "__main__":
    main(sys.argv[1:])
