"""Composition of a page from its parts, as one HTML file that needs no network.

Owns the Content-Security-Policy, which allows the page's own styles and scripts by their hashes and
nothing else, and the embedding of data. Text from programs enters a page only as data.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Any

__all__ = ["BASE", "Parts", "compose", "part"]

#: From this many characters on, data is compressed. Smaller data can be read in the page's source.
_LARGE = 1 << 19
#: What would end a script's element, or begin a comment in it.
_REFUSED = ("</script", "</style", "<!--")


@dataclass(frozen=True, slots=True)
class Parts:
    """Styles and scripts of a page, in the order in which they take effect.

    >>> (Parts(("p {}",)) + Parts(("p {}", "b {}"))).styles
    ('p {}', 'b {}')
    """

    styles: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()

    def __add__(self, other: Parts) -> Parts:
        """Return these and the other's; a part that both have is there once."""
        return Parts(_once(*self.styles, *other.styles), _once(*self.scripts, *other.scripts))


def compose(title: str, body: str, parts: Parts, data: Mapping[str, Any]) -> str:
    """Return a page as HTML.

    Args:
        title: Its title, as plain text.
        body: Markup, which is never made of a program's text.
        parts: Its styles and scripts, after `BASE`.
        data: Name -> what JSON can hold. Scripts get it by ``amanda.data(name)`` in the function
            that they give to ``amanda.ready``.

    >>> page = compose("Calls", "<p id='calls'></p>", Parts(), {"calls": {"relu": 2}})
    >>> '<script type="application/json" id="data-calls">{"relu":2}</script>' in page
    True
    """
    parts = BASE + parts
    for text in (*parts.styles, *parts.scripts):
        for refused in _REFUSED:
            if refused in text.lower():
                raise ValueError(f"A part of the page contains {refused!r}: {text[:80]!r}")
    return Template(part(__package__, "page.html")).substitute(
        title=html.escape(title),
        style_hashes=_hashes(parts.styles),
        script_hashes=_hashes(parts.scripts),
        styles="\n".join(f"<style>{text}</style>" for text in parts.styles),
        body=body,
        data="\n".join(_data(name, value) for name, value in data.items()),
        scripts="\n".join(f"<script>{text}</script>" for text in parts.scripts),
    )


def part(package: str | None, name: str) -> str:
    """Return the text of a file in a package, such as ``page/page.js``.

    >>> part("amanda_tools.kit.page", "page.html")[:15]
    '<!doctype html>'
    """
    return resources.files(package or __name__).joinpath(*name.split("/")).read_text("utf-8")


def _once(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _hashes(texts: Iterable[str]) -> str:
    """Return the sources of a policy that allow these texts, or the one that allows none."""
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    found = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return " ".join(found) or "'none'"


def _data(name: str, value: Any) -> str:
    """Return an element with data; large data is compressed, which browsers undo."""
    text, identity = json.dumps(value, separators=(",", ":")), f"data-{html.escape(name)}"
    if len(text) < _LARGE:
        return f'<script type="application/json" id="{identity}">{_escaped(text)}</script>'
    # Without a time, so that the same data is the same page.
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f'<script type="text/plain" data-encoding="gzip" id="{identity}">{packed}</script>'


def _escaped(text: str) -> str:
    """Return JSON that is safe inside a page: it cannot end its element or begin another."""
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


#: What every page has: the colours, and what scripts share.
BASE = Parts((part(__package__, "palette.css"),), (part(__package__, "base.js"),))
