"""The libraries of others that pages contain, as they are in ``vendor/``.

``vendor/manifest.json`` has the version, licence, origin and hash of each; `nox -s vendor` renews
them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from amanda_tools.kit.page.composition import part

__all__ = ["library", "manifest"]


def manifest() -> dict[str, Any]:
    """Return name of a library -> what is known of it."""
    found: dict[str, Any] = json.loads(part(__package__, "vendor/manifest.json"))
    return found


def library(name: str) -> str:
    """Return the script of a library, ``echarts`` or ``dagre``, with the notices of licences.

    >>> library("dagre").splitlines()[1].split()[0]
    'dagre'
    """
    known = manifest()[name]
    notices = [part(__package__, f"vendor/{notice}") for notice in known["notices"]]
    head = "\n".join([f"{name} {known['version']}, {known['home']}, {known['license']}", *notices])
    script = part(__package__, f"vendor/{name}.min.js")
    # Nobody has the file that it names.
    script = re.sub(r"\n//# sourceMappingURL=\S+\s*$", "\n", script)
    return f"/*\n{head.replace('*/', '')}*/\n{script}"
