"""Check pages in light and dark, on a wide and on a narrow screen: `nox -s accessibility`.

``python -m maintenance.browser AXE PAGE ...`` opens pages, and all those in folders such as
build/site, which it serves on this machine. AXE is ``axe.min.js`` of the npm package axe-core:
``npm pack axe-core`` fetches it. It lists what axe objects to, pages that scroll sideways, what is
on the console, and links that lead nowhere. The browser reaches no network. ``--reports FOLDER``
makes the reports of all tools there and checks them too; ``--pictures FOLDER`` keeps a picture of
each page; ``--only PATTERN`` takes those of a folder whose path in it has this regular expression.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urldefrag

from selenium.common.exceptions import TimeoutException

from . import chromium, reports, serve

#: Width and height.
SIZES = ((1440, 900), (390, 844))
#: Opens what is folded, and the details of the first operator. A page of the reference has the
#: sources of hundreds of functions, which axe would look at for minutes: it keeps the first ones.
OPEN = """
for (const one of [...document.querySelectorAll('details.mkdocstrings-source')].slice(5))
  one.remove();
for (const one of document.querySelectorAll('main details, .md-content details')) one.open = true;
if (globalThis.amanda?.details?.names) {
  const [name] = amanda.details.names();
  if (name) amanda.details.open({name});
}
"""
AXE = r"""
const done = arguments[0];
axe.run({resultTypes: ['violations']}).then(({violations}) => done(violations.flatMap((one) =>
  one.nodes.map((node) => `${one.id}: ${one.help}: ${node.target.join(' ')}: `
    + node.html.replace(/\s+/g, ' ').slice(0, 160)
    + ` (${node.any.concat(node.all, node.none).map((it) => it.message).join('; ')})`))),
  (error) => done([`axe failed: ${error}`]));
"""
#: What is wider than the screen, the innermost of it.
SIDEWAYS = """
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth <= width) return [];
const wide = [...document.querySelectorAll('body *')].filter((it) => {
  if (it.getBoundingClientRect().right <= width + 1) return false;
  for (let up = it.parentElement; up && up !== document.body; up = up.parentElement)
    if (getComputedStyle(up).overflowX !== 'visible') return false;
  return true;
});
const inner = wide.filter((it) => !wide.some((other) => other !== it && it.contains(other)));
return inner.slice(0, 5).map((it) =>
  `scrolls sideways: ${it.tagName} ${it.id || it.className}: ${it.textContent.trim().slice(0, 60)}`)
  .concat(inner.length ? [] : ['scrolls sideways']);
"""
UNDRAWN = """
return [...document.querySelectorAll('.chart > .problem')].map((it) => it.textContent);
"""
LINKS = """
return [[...document.querySelectorAll('a[href]')].map((it) => it.href),
        [...document.querySelectorAll('[id], a[name]')].map((it) => it.id || it.name)];
"""


def main(arguments: list[str]) -> int:
    """Check the pages; print what is wrong with each and return 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.browser")
    parser.add_argument("axe", type=Path, help="axe.min.js of the npm package axe-core")
    parser.add_argument("pages", type=Path, nargs="*", help="pages, or folders of them")
    parser.add_argument("--reports", type=Path, help="where to make the reports of all tools")
    parser.add_argument("--only", type=re.compile, default="", help="of folders, only such pages")
    parser.add_argument("--pictures", type=Path, help="where to keep a picture of each page")
    options = parser.parse_args(arguments)
    if not options.axe.is_file():
        parser.error(f"{options.axe} is not a file; `npm pack axe-core` fetches axe.min.js")
    for missing in (page for page in options.pages if not page.exists()):
        parser.error(f"{missing} is missing; `nox -s docs` builds the site")
    with contextlib.ExitStack() as ends:
        pages: dict[str, Path] = {}
        for page in options.pages:
            pages |= addresses(page.resolve(), ends, options.only)
        if options.reports:
            options.reports.mkdir(parents=True, exist_ok=True)
            made = reports.make_all(options.reports)
            pages |= {page.resolve().as_uri(): page.resolve() for page in made}
        if not pages:
            parser.error("Name pages or folders, or use --reports")
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
        browser = chromium.open_browser()
        ends.callback(browser.quit)
        checks = Checks(browser, options.axe.read_text("utf-8"), options.pictures)
        for address, page in pages.items():
            checks.check(address, page)
        broken = checks.broken_links()
    problems = checks.problems + broken
    print(*broken, sep="\n")
    print(f"{len(pages)} pages, {checks.views} views, {len(problems)} problems")
    return 1 if problems else 0


def addresses(
    page: Path, ends: contextlib.ExitStack, only: str | re.Pattern[str]
) -> dict[str, Path]:
    """Return the addresses of a page, or of those in a folder, which is served until the end."""
    if not page.is_dir():
        return {page.as_uri(): page}
    root = ends.enter_context(serve.folder(page))
    # 404.html is served for any address, so its links begin at the root.
    files = sorted(file for file in page.rglob("*.html") if file.name != "404.html")
    paths = {file.relative_to(page).as_posix(): file for file in files}
    return {root + quote(path): file for path, file in paths.items() if re.search(only, path)}


class Checks:
    """What is wrong with the pages that a browser has shown."""

    def __init__(self, browser: Any, axe: str, pictures: Path | None = None) -> None:
        self.browser = browser
        self.axe = axe
        self.pictures = pictures
        self.problems: list[str] = []
        self.views = 0
        #: Address of a page -> addresses that it links to, and its anchors.
        self.links: dict[str, tuple[list[str], set[str]]] = {}

    def check(self, address: str, page: Path) -> None:
        """Look at a page at each size and in each colour scheme."""
        print(page, flush=True)
        for width, height in SIZES:
            chromium.resize(self.browser, width, height)
            for scheme in chromium.SCHEMES:
                found = []
                try:
                    chromium.show(self.browser, address, scheme)
                except TimeoutException:
                    found.append("a chart stays empty, or the page does not load")
                found += self.look(page, f"{width}-{scheme}") + chromium.messages(self.browser)
                found = [f"{page} {width} {scheme}: {text}" for text in found]
                print(*found, sep="\n", end="\n" if found else "", flush=True)
                self.problems += found
                self.views += 1
        links, anchors = self.browser.execute_script(LINKS)
        self.links[address] = links, set(anchors)

    def look(self, page: Path, view: str) -> list[str]:
        """Return what is wrong with the page as it is shown now."""
        chromium.next_frame(self.browser)
        if self.pictures:
            # As it opens. What is folded is long.
            shown = self.browser.execute_cdp_cmd(
                "Page.captureScreenshot", {"captureBeyondViewport": True}
            )
            # The page of a graph lies in the folder of its run.
            name = "-".join([*page.with_suffix("").parts[-3:], view])
            (self.pictures / f"{name}.png").write_bytes(base64.b64decode(shown["data"]))
        found = list(self.browser.execute_script(SIDEWAYS) + self.browser.execute_script(UNDRAWN))
        self.browser.execute_script(OPEN)
        chromium.next_frame(self.browser)
        self.browser.execute_script(self.axe)
        return found + list(self.browser.execute_async_script(AXE))

    def broken_links(self) -> list[str]:
        """Return the links to files, or to places in the pages seen, that lead nowhere."""
        links = {page: dict.fromkeys(links) for page, (links, _) in self.links.items()}
        targets = {urldefrag(link)[0] for of_page in links.values() for link in of_page}
        here = {target for target in targets if target.startswith(("file:", "http://127.0.0.1:"))}
        missing = {target for target in here if not serve.exists(target)}
        broken = []
        for page, of_page in links.items():
            for link in of_page:
                target, anchor = urldefrag(link)
                if target in missing:
                    broken.append(f"{page}: there is no {link}")
                elif (
                    anchor and target in self.links and unquote(anchor) not in self.links[target][1]
                ):
                    broken.append(f"{page}: there is no place {link}")
        return broken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
