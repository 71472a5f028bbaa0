"""Headers of the extension are included one way, from what is redirected down to what all share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_interceptor

NATIVE = Path(__file__).parents[1] / "src/amanda_driver_torch/native"
#: Folders from the top down. The last one is the folder of the sources itself.
FOLDERS = ("interception", "programs", "recording", "gradients", "identity", ".")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def sources() -> dict[str, str]:
    found = (path for path in NATIVE.rglob("*") if path.suffix in (".h", ".cpp"))
    return {path.relative_to(NATIVE).as_posix(): path.read_text("utf-8") for path in found}


def upward(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield the includes of what is in no lower folder, and of what does not exist."""
    for name, text in texts.items():
        for included in _INCLUDE.findall(text):
            folders = (str(Path(name).parent), str(Path(included).parent))
            here, there = map(FOLDERS.index, folders)
            if included not in texts or there < here:
                yield f"{name}: {included}"


def test_includes_go_down() -> None:
    texts = sources()
    assert {str(Path(name).parent) for name in texts} == set(FOLDERS)
    assert list(upward(texts)) == []


def test_headers_have_no_circle() -> None:
    after = {
        name: set(_INCLUDE.findall(text)) for name, text in sources().items() if name[-2:] == ".h"
    }
    while leaves := [name for name, included in after.items() if not included & set(after)]:
        for name in leaves:
            del after[name]
    assert after == {}


def test_an_include_that_goes_up_is_found() -> None:
    texts = sources() | {"watch.h": '#include "interception/redirect.h"\n#include "gone.h"\n'}
    assert list(upward(texts)) == ["watch.h: interception/redirect.h", "watch.h: gone.h"]
