"""The site has every page and every public name, and those made of the sources are current."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import amanda

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `maintenance` lies in the root, which `-P` hides.

from maintenance.site import hooks, reference  # noqa: E402

pytestmark = pytest.mark.one_interceptor


def test_pages_made_of_the_sources_are_current() -> None:
    for place, text in reference.pages().items():
        assert place.read_text("utf-8") == text, "python -m maintenance.site.reference writes it"


def test_every_public_name_has_an_entry_and_amandas_an_example() -> None:
    entries: dict[str, list[str]] = {}
    for name, page in reference.PAGES.items():
        text = (reference.FOLDER / f"{name}.md").read_text("utf-8")
        found = re.findall(r"^(?:::: \S+\.|## `)(\w+)`?$", text, re.MULTILINE)
        assert found, name
        entries.setdefault(page.module, []).extend(found)
    for module, names in entries.items():
        assert sorted(names) == sorted(reference.public(module))
    text = (reference.FOLDER / "amanda.md").read_text("utf-8")
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    indirect = {"OpContext", "Selection"}  # Examples get them from a function.
    missing = [name for name in amanda.__all__ if not re.search(rf"amanda\.{name}\b", code)]
    assert set(missing) == indirect
    methods = {
        name
        for name in dir(amanda.OpContext)
        if not name.startswith("_") and not hasattr(dict, name)
    }
    shown = {name for name in methods if re.search(rf"\bop\.{name}\b", code)}
    of_drivers = {"execution", "fill", "plan", "plans", "release", "site", "trigger_callback"}
    of_drivers |= {"remember", "remember_constants", "remembered"}
    assert methods - shown == of_drivers


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(
        re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    )
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert navigation == pages


def test_links_out_of_the_pages_lead_to_the_repository() -> None:
    class File:
        src_uri = "guides/a.md"

    class Page:
        file = File

    class Config:
        repo_url = "https://example.org/r"

    text = "[a](../tools/b.md) [c](../../tests/d.py) [e](https://x.org) [f](g.md#h)"
    assert hooks.on_page_markdown(text, page=Page, config=Config) == (
        "[a](../tools/b.md) [c](https://example.org/r/blob/main/tests/d.py) "
        "[e](https://x.org) [f](g.md#h)"
    )


def test_a_block_that_is_a_file_has_its_name() -> None:
    class Page:
        class file:
            src_uri = "a.md"

    class Config:
        repo_url = "https://example.org/r"

    text = "Write:\n\n`src/train.py`:\n```python\nx = 1\n```\n\n```python\ny = 2\n```\n"
    assert hooks.on_page_markdown(text, page=Page, config=Config) == (
        'Write:\n\n```python title="src/train.py"\nx = 1\n```\n\n```python\ny = 2\n```\n'
    )


def test_names_of_files_are_read_by_everybody() -> None:
    """A comment is shown neither on the host of the repository nor on the site."""
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("*.md")]
    assert [page.name for page in pages if "<!-- file:" in page.read_text("utf-8")] == []


def test_every_section_landmark_and_dialog_has_a_name_and_no_page_asks_for_stars() -> None:
    class Page:
        url = "guides/a.html"

    before = """
        <a class="md-source" data-md-component="source">repository</a>
        <div class="md-search" data-md-component="search" role="dialog">
        <label for="__nav_1_2" id="__nav_1_2_label"><span></span></label>
        <nav aria-labelledby="__nav_1_2_label">
        <label class="md-nav__title" for="__nav_1_2"><span></span>Tools</label>
        <th style="text-align: right;"></th><th>light</th>
        <script src="https://unpkg.com/iframe-worker/shim"></script>"""
    assert (
        hooks.on_post_page(before, page=Page())
        == """
        <a class="md-source">repository</a>
        <div class="md-search" data-md-component="search" role="dialog" aria-label="Search">
        <label for="__nav_1_2" id="__nav_1_2_label"><span></span></label>
        <nav aria-labelledby="__nav_1_2_title">
        <label class="md-nav__title" for="__nav_1_2" id="__nav_1_2_title"><span></span>Tools</label>
        <td style="text-align: right;"></td><th>light</th>
        <script src="../assets/iframe-worker.js"></script>"""
    )
