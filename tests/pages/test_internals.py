"""The pages of `docs/internals` name each module, so that a newcomer finds what owns what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_interceptor

ROOT = Path(__file__).parents[2]
PAGES = {
    "amanda_core": "core",
    "amanda_driver_jax": "jax",
    "amanda_driver_mindspore": "mindspore",
    "amanda_driver_mxnet": "mxnet",
    "amanda_driver_onnxruntime": "onnxruntime",
    "amanda_driver_tf": "tensorflow",
    "amanda_driver_torch": "pytorch",
    "amanda_tools": "tools",
}
#: The suite of the conformance kit has a page of its own, docs/conformance.md.
ELSEWHERE = "testing/suite/"


def modules(member: str) -> list[str]:
    source = ROOT / member / "src" / member
    found = (path.relative_to(source).with_suffix("") for path in sorted(source.rglob("*.py")))
    return [
        path.as_posix()
        for path in found
        if path.name != "__init__" and not path.as_posix().startswith(ELSEWHERE)
    ]


@pytest.mark.parametrize("member", PAGES)
def test_the_page_of_a_member_names_its_modules(member: str) -> None:
    text = (ROOT / f"docs/internals/{PAGES[member]}.md").read_text("utf-8")
    code = {name for span in re.findall(r"`([^`\n]+)`", text) for name in re.split(r"[^\w]", span)}
    names = modules(member)
    assert len(names) > 10
    assert [name for name in names if name.rpartition("/")[2] not in code] == []


def test_no_weak_set_of_python_is_used() -> None:
    """Threads apply tools at the same time: `WeakGroup` may change while one goes over it."""
    paths = [path for member in PAGES for path in (ROOT / member / "src").rglob("*.py")]
    assert [path.name for path in paths if "WeakSet" in path.read_text("utf-8")] == ["threads.py"]


def test_the_index_leads_to_each_page() -> None:
    text = (ROOT / "docs/README.md").read_text("utf-8")
    pages = sorted(page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md"))
    assert [page for page in pages if f"]({page})" not in text and page != "README.md"] == []
    assert "](docs/README.md)" in (ROOT / "README.md").read_text("utf-8")
