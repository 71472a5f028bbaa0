"""Pages: what their policy allows, data that stays data, and the libraries of others in them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
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


def rows(count: int) -> list[dict[str, object]]:
    return [{"name": f"layer.{n}/linear", "macs": n * n, "text": HOSTILE} for n in range(count)]


def test_large_data_is_compressed_and_stays_data() -> None:
    value = rows(20_000)
    plain = json.dumps(value)
    text = compose("x", "", Parts(), {"rows": value, "small": 1})
    page = Elements(text)
    packed = [
        (attributes, content)
        for attributes, content in page.of("script")
        if attributes.get("data-encoding") == "gzip"
    ]
    [(attributes, content)] = packed
    assert attributes["id"] == "data-rows"
    assert json.loads(gzip.decompress(base64.b64decode(content))) == value
    assert len(text) < len(plain) / 8
    assert text == compose("x", "", Parts(), {"rows": value, "small": 1})
    assert '<script type="application/json" id="data-small">1</script>' in text
    assert "http" not in text.replace("http-equiv", "").lower()


@pytest.mark.parametrize("count", [3, 20_000])
def test_scripts_read_data_of_any_size(count: int) -> None:
    """By the page's own script, in Node.js with the elements of the page."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    page = Elements(compose("x", "", Parts(), {"rows": rows(count), "other": [1]}))
    elements = [
        {"id": a["id"], "encoding": a.get("data-encoding"), "textContent": content}
        for a, content in page.of("script")
        if "type" in a
    ]
    program = f"""
      const elements = JSON.parse(require("fs").readFileSync(0, "utf8"));
      for (const one of elements) one.remove = () => {{ one.removed = true; }};
      const node = {{style: {{}}, append() {{}}}};
      globalThis.document = {{
        getElementById: (id) => elements.find((one) => one.id === id),
        querySelectorAll: (query) => {{
          if (query !== "script[data-encoding=gzip]") throw new Error(query);
          return elements.filter((one) => one.encoding === "gzip");
        }},
        createElement: () => ({{...node}}), body: node,
      }};
      globalThis.matchMedia = () => ({{addEventListener() {{}}}});
      {part("amanda_tools.kit.page", "base.js").replace("const amanda", "globalThis.amanda")}
      let order = "";
      const done = amanda.ready(() => {{
        order += "read ";
        console.log(JSON.stringify([amanda.data("rows"), amanda.data("other"), order]));
      }});
      order += "loaded ";
    """
    done = subprocess.run(
        [node, "-e", program],
        input=json.dumps(elements),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found, other, order = json.loads(done.stdout)
    assert (found, other) == (rows(count), [1])
    # What is not compressed is there at once, as scripts of a page run one after another.
    assert order == ("read " if count == 3 else "loaded read ")
