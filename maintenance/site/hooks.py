"""Functions that mkdocs calls while it builds the site.

Pages link to files of the repository as a reader of it follows them. On the site, a link that leads
out of `docs` becomes one to the repository's page on the host. Nothing is loaded from elsewhere.
A block that is written to a file, as a comment above it says, has the file's name as its title.
What Material leaves without a name gets one, so that screen readers tell it.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# mkdocs loads this file by its path.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from maintenance.site import agents

__all__ = ["on_page_markdown", "on_post_build", "on_post_page"]

#: `iframe-worker` 1.0.4 of the npm registry, with which browsers search a site on disk.
VENDOR = Path(__file__).with_name("vendor")
_SHIM = "https://unpkg.com/iframe-worker/shim"
#: Named in mkdocs.yml as `assets/...`.
_OWN = ("site.css", "site.js")
_MENDED = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # By this mark, the page asks api.github.com for the repository's stars.
        (r' data-md-component="source"', ""),
        (r'(<div class="md-search"[^>]* role="dialog")', r'\1 aria-label="Search"'),
        # The label of a section that has a page is an arrow. Its title has the words.
        (r'aria-labelledby="(__nav_[\d_]+)_label"', r'aria-labelledby="\1_title"'),
        (r'(<label class="md-nav__title" for="(__nav_[\d_]+)")', r'\1 id="\2_title"'),
        (r"<th([^>]*)></th>", r"<td\1></td>"),
    )
)
_FILE = re.compile(r"^`([^\s`]+)`:\n(```\w+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with its links out of `docs` replaced, and with titles of its files."""

    def one(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), match[1]))
        if not target.startswith("../"):
            return match[1]
        return f"{config.repo_url}/blob/main/{target.removeprefix('../')}"

    return _LINK.sub(one, _FILE.sub(r'\2 title="\1"', markdown))


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Return the page with names, and the script of the search from disk taken from the site."""
    return _mended(output, "../" * page.url.count("/"))


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write the files for agents, and copy scripts and styles to where pages look for them.

    mkdocs does not run its own step for pages on 404.html.
    """
    for name, text in {"llms.txt": agents.index({}), "llms-full.txt": agents.everything()}.items():
        Path(config.site_dir, name).write_text(text, "utf-8")
    missing = Path(config.site_dir, "404.html")
    root = urlsplit(config.site_url).path
    missing.write_text(_mended(missing.read_text("utf-8"), root), "utf-8")
    for file in (VENDOR / "iframe-worker.js", *map(Path(__file__).with_name, _OWN)):
        shutil.copy(file, Path(config.site_dir, "assets"))


def _mended(output: str, root: str) -> str:
    output = output.replace(_SHIM, f"{root}assets/iframe-worker.js")
    for pattern, replacement in _MENDED:
        output = pattern.sub(replacement, output)
    return output
