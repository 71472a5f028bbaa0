"""Guides and pages of tools: their files are written, their programs and commands run, in order.

A Python block is executed; all blocks of a page share one namespace. A block after the line
`` `NAME`: `` is written to that file instead. In a `console` block each ``$`` line is run, and the
lines below it must occur in the output in that order, with ``...`` for anything. Pages that install
what they make do it in an environment of their own. Other blocks are ignored, but each line of any
page that begins with ``amanda run`` is run with a program of the tests.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from amanda_core.interface import hookspecs
from amanda_core.testing import CAPABILITIES

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `maintenance` lies in the root, which `-P` hides.

from maintenance.walk import pages  # noqa: E402
from maintenance.walk.pages import Block, blocks  # noqa: E402

GUIDES = sorted(
    [
        *(page for part in ("guides", "tools") for page in (ROOT / "docs" / part).glob("*.md")),
        *(ROOT / "docs" / name for name in ("tutorial.md", "gallery.md", "reference/amanda.md")),
        *(ROOT / "skills").glob("*/SKILL.md"),
    ]
)
#: A command, and the comment after it. One whose comment says that it is wrong must fail.
_LINE = re.compile(r"^ *(?:\$ )?(amanda run [^\n#]*?)(?: +# (?P<note>.*))?$", re.MULTILINE)
#: What such commands run, and a tool that one of them names.
FILES = {
    "train.py": """\
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
""",
    "infer.py": """\
import numpy, onnx, onnxruntime
from onnx import helper
kind, values = onnx.TensorProto.FLOAT, numpy.ones((8, 4), numpy.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["y"])],
    "model",
    [helper.make_tensor_value_info("x", kind, (2, 8))],
    [helper.make_tensor_value_info("y", kind, (2, 4))],
    [onnx.numpy_helper.from_array(values, "w")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
session = onnxruntime.InferenceSession(model.SerializeToString())
for _ in range(3):
    session.run(None, {"x": numpy.ones((2, 8), numpy.float32)})
""",
    "my_tools.py": """\
import amanda
class Counter(amanda.Tool):
    pass
""",
}


def environment(folder: Path) -> Path:
    """Make an environment over this one, offline, and return the folder of its programs."""
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    python = programs / "python"
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here, outer = (
        subprocess.run(
            [one, "-c", place], capture_output=True, text=True, check=True
        ).stdout.strip()
        for one in (python, sys.executable)
    )
    Path(here, "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    for name in ("amanda", "pip", "pytest"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{python}" -m {name} "$@"\n')
        (programs / name).chmod(0o755)
    return programs


def _as_a_user() -> dict[str, str]:
    """Return the environment without what a session of the tests adds to it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def run(block: Block, where: str, programs: str) -> None:
    """Run the commands of a block and compare their output."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    # An installation needs nothing that is not here.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    for command, expected in pages.commands(block):
        done = subprocess.run(
            command,
            shell=True,
            env={**_as_a_user(), **offline, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{where}: {command}\n{done.stdout}"
        rest = iter(done.stdout.splitlines())
        for line in filter(None, expected.splitlines()):
            # Columns are as wide as their contents, which differ by place and version.
            words = (re.escape(word).replace(r"\.\.\.", ".*") for word in line.split())
            pattern = re.compile(r"\s+".join(words) + ("" if line.endswith("...") else r".*"))
            assert any(pattern.match(given) for given in rest), f"{where}: {line}\n{done.stdout}"


#: Skills of few further commands.
RARELY = ("count-flops", "profile", "sensitivity")


def marked(page: Path) -> Any:
    """Return a page, marked as exhaustive if others run most of its commands."""
    rare = page.parent.name in RARELY
    return pytest.param(page, marks=pytest.mark.exhaustive) if rare else page


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Of torch.onnx itself.
@pytest.mark.parametrize(
    "page",
    [*map(marked, GUIDES)],
    ids=lambda page: page.parent.name if page.stem == "SKILL" else page.stem,
)
def test_what_a_guide_shows_works(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": f"guide_{page.stem}"}
    before = set(sys.modules)
    installs = any(b.language == "console" and "pip install" in b.text for b in blocks(page))
    programs = environment(tmp_path / "env") if installs else os.path.dirname(sys.executable)
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.file is not None:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        elif block.language == "console":
            run(block, where, str(programs))
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_block_has_a_language() -> None:
    for page in GUIDES:
        assert page.stem != "SKILL" or len(page.read_text("utf-8").splitlines()) <= 200
        assert page.read_text().count("```") == 2 * len(list(blocks(page)))
        assert all(block.language for block in blocks(page))


def test_every_hook_is_in_the_reference_with_its_signature() -> None:
    text = (ROOT / "docs/guides/hooks.md").read_text()
    documented = re.findall(r"^## `(amanda_\w+)(\(.*)`$", text, re.MULTILINE)
    hooks = {name: found for name, found in vars(hookspecs).items() if name.startswith("amanda_")}
    assert dict(documented) == {
        name: str(inspect.signature(hook)).replace("'", "") for name, hook in hooks.items()
    }


def test_every_capability_is_in_the_guide() -> None:
    text = (ROOT / "docs/guides/writing-a-driver.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    assert {word: meaning.replace("`", "") for word, meaning in table} == dict(CAPABILITIES)


def prose_of(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"(?s)```.*?```", "", page.read_text("utf-8"))


def test_links_lead_somewhere() -> None:
    top = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/internals/*.md")]
    for page in [*GUIDES, *top]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose_of(page)):
            assert target.startswith("https://") or (page.parent / target).exists(), target


#: Where pages show commands. The example of a tool has a test of its own for its command.
PAGES = ("*.md", "docs/**/*.md", "amanda_*/README.md", "skills/*/SKILL.md")


def commands() -> dict[str, list[tuple[str, str]]]:
    """Return page -> its commands that no other test runs, and their comments."""
    found = {}
    everywhere = [page for part in PAGES for page in ROOT.glob(part)]
    for page in sorted(everywhere):
        text = page.read_text()
        shown = [b.text for b in blocks(page) if b.language == "console"] if page in GUIDES else []
        lines = [(m[1].strip(), m["note"] or "") for m in _LINE.finditer(text)]
        lines = [one for one in lines if not any(f"$ {one[0]}" in block for block in shown)]
        if lines:
            found[str(page.relative_to(ROOT))] = lines
    return found


COMMANDS = commands()


def test_commands_of_several_pages_are_found() -> None:
    assert {"README.md", "docs/errors.md", "docs/guides/report.md"} <= COMMANDS.keys()


@pytest.mark.parametrize("page", COMMANDS)
def test_each_command_of_a_page_runs(page: str, tmp_path: Path) -> None:
    for name, text in (*FILES.items(), ("package/train.py", FILES["train.py"])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env={**_as_a_user(), "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    for command, note in COMMANDS[page]:
        done = run(command)
        if note.startswith("wrong"):
            done = run(command)  # It may be wrong the second time only.
            assert "Error: " in done.stdout, command
            assert done.returncode != 0, command
        else:
            assert done.returncode == 0, f"{command}\n{done.stdout}"
