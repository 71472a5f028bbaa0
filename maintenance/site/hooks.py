"""Functions that mkdocs calls while it builds the site.

Pages link to files of the repository as a reader of it follows them. On the site, a link that leads
out of `docs` becomes one to the repository's page on the host. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

# mkdocs loads this file by its path.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from maintenance.site import agents

__all__ = ["on_page_markdown", "on_post_build", "on_post_page"]

#: `iframe-worker` 1.0.4 of the npm registry, with which browsers search a site on disk.
VENDOR = Path(__file__).with_name("vendor")
_SHIM = "https://unpkg.com/iframe-worker/shim"
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with its links out of `docs` replaced."""

    def one(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), match[1]))
        if not target.startswith("../"):
            return match[1]
        return f"{config.repo_url}/blob/main/{target.removeprefix('../')}"

    return _LINK.sub(one, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Return the page with the script of the search from disk taken from the site itself."""
    place = "../" * page.url.count("/") + "assets/iframe-worker.js"
    return output.replace(_SHIM, place)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write the files for agents, and copy that script to where pages look for it.

    mkdocs does not run its own step for pages on 404.html.
    """
    for name, text in {"llms.txt": agents.index(), "llms-full.txt": agents.everything()}.items():
        Path(config.site_dir, name).write_text(text, "utf-8")
    missing = Path(config.site_dir, "404.html")
    text = missing.read_text("utf-8").replace(_SHIM, "/assets/iframe-worker.js")
    missing.write_text(text, "utf-8")
    shutil.copy(VENDOR / "iframe-worker.js", Path(config.site_dir, "assets"))
