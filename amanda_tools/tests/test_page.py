"""Pages: what their policy allows, data that stays data, and the libraries of others in them."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from importlib import resources

import pytest

from amanda_tools.kit.page.composition import BASE, Parts, compose, part
from amanda_tools.kit.page.libraries import library, manifest

VENDOR = resources.files("amanda_tools.kit.page") / "vendor"
PERMISSIVE = {"Apache-2.0", "BSD-3-Clause", "MIT"}
HOSTILE = "</script><script>broken()</script><!--<script>&lt;\u2028'\"`${x}$style"


class Elements(html.parser.HTMLParser):
    """The elements of a page with their attributes and contents."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, content = self.found[-1]
            self.found[-1] = tag, attributes, content + data

    def of(self, name: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, content) for tag, attributes, content in self.found if tag == name]


def test_the_policy_allows_the_own_parts_and_nothing_else() -> None:
    page = Elements(compose("A page", "<main></main>", Parts(("p {}",), ("let a;",)), {"b": 1}))
    [policy] = [a["content"] for a, _ in page.of("meta") if "http-equiv" in a]
    assert policy is not None
    directives = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    scripts = [content for attributes, content in page.of("script") if "type" not in attributes]
    for directive, texts in (
        ("style-src", [content.rstrip("\n") for _, content in page.of("style")]),
        ("script-src", [content.rstrip("\n") for content in scripts]),
    ):
        parts = [*BASE.styles, "p {}"] if directive == "style-src" else [*BASE.scripts, "let a;"]
        assert texts == [text.rstrip("\n") for text in parts]
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in parts]
        assert directives.pop(directive) == " ".join(f"'sha256-{h.decode()}'" for h in hashes)
    assert directives == {"default-src": "'none'", "img-src": "data:"}


def test_names_in_a_page_stay_data() -> None:
    plain = Elements(compose("x", "", Parts(), {"names": ["plain"]}))
    page = Elements(compose(HOSTILE, "", Parts(), {"names": [HOSTILE, {HOSTILE: 1}]}))
    assert [tag for tag, _, _ in page.found] == [tag for tag, _, _ in plain.found]
    [data] = [content for attributes, content in page.of("script") if "type" in attributes]
    assert json.loads(data) == [HOSTILE, {HOSTILE: 1}]
    [(_, title)] = page.of("title")
    assert title.strip() == HOSTILE


@pytest.mark.parametrize("text", ["a = '</script>'", "/* </STYLE */", "x = '<!--'"])
def test_a_part_that_would_end_its_element_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="A part of the page contains"):
        compose("x", "", Parts((), (text,)), {})


def test_parts_of_two_are_there_once() -> None:
    assert Parts(("a",), ("b", "c")) + Parts(("a", "d"), ("c",)) == Parts(("a", "d"), ("b", "c"))


def test_the_libraries_are_those_of_the_manifest() -> None:
    named = {name: file for known in manifest().values() for name, file in known["files"].items()}
    assert {file.name for file in VENDOR.iterdir()} == {*named, "manifest.json"}
    for name, file in named.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == file["sha256"], name
    for name, known in manifest().items():
        assert known["license"] in PERMISSIVE, name
        assert known["tarball"].startswith("https://registry.npmjs.org/"), name
        assert known["version"] in known["tarball"], name
        assert any(notice.endswith("LICENSE") for notice in known["files"]), name
        for notice in known["notices"]:
            assert part("amanda_tools.kit.page", f"vendor/{notice}").strip() in library(name), name


def test_no_library_makes_code_of_text() -> None:
    # ECharts reads maps of the world without JSON.parse so; every browser has JSON.parse.
    known = '"undefined"!=typeof JSON&&JSON.parse?JSON.parse(i):new Function("return ("+i+");")()'
    code = re.compile(r"\beval\s*\(|\bFunction\s*\(|\b(setTimeout|setInterval)\s*\(\s*[\"'`]")
    for name in ("echarts", "dagre"):
        assert not code.search(library(name).replace(known, "")), name
    assert code.search(library("echarts"))
