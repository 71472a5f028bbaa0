"""What `import amanda` costs, and what other processes see: each test starts a new Python."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False
    )


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(*distributions: str) -> set[str]:
    """Return these distributions and all that they require, without extras."""
    found: set[str] = set()
    waiting = list(distributions)
    while waiting:
        name = canonical(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # Of another Python or system.
        for requirement in requirements:
            match = re.match(r"[\w.-]+", requirement)
            if match and "extra ==" not in requirement:
                waiting.append(match[0])
    return found


def modules_of(distributions: set[str]) -> set[str]:
    return {
        module
        for module, names in metadata.packages_distributions().items()
        if any(canonical(name) in distributions for name in names)
    }


def test_import_amanda_imports_no_framework_nor_numpy_nor_rich() -> None:
    done = python("import amanda, sys; print(*sorted({m.partition('.')[0] for m in sys.modules}))")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "amanda_core" in loaded
    unwanted = {"torch", "tensorflow", "jax", "mxnet", "mindspore", "numpy", "rich", "click"}
    unwanted.add("amanda_tools")
    assert not loaded & unwanted
    third_party = loaded - set(sys.stdlib_module_names)
    known = {"amanda", "amanda_core", *modules_of(required_by("pluggy", "importlib-metadata"))}
    # Installed drivers describe themselves, from modules that import no framework.
    drivers = {p.module.partition(".")[0] for p in metadata.entry_points(group="amanda.drivers")}
    # What a site's .pth files load (editable installs, coverage) is there without us.
    bare = python("import sys; print(*{m.partition('.')[0] for m in sys.modules})").stdout
    assert third_party - set(bare.split()) <= known | drivers


def test_import_amanda_loads_a_few_modules() -> None:
    # What an import costs is what it loads; beside it, the time is that of the machine.
    count = "import sys; before = len(sys.modules); import amanda; print(len(sys.modules) - before)"
    assert int(python(count).stdout) < 250


PROGRAM = """
from amanda_core.identity.identity import stable_id
print(stable_id(("encoder", "linear", "model", 12, None)))
print(stable_id((stable_id("a"), (0, "b"))))
"""


def test_op_ids_are_the_same_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "2")
    }
    (output,) = outputs
    # blake2b of the key's repr, 8 bytes big-endian, without the last bit; computed with b2sum.
    assert [int(line) for line in output.split()] == [FIRST, SECOND]


FIRST = 384415730033332316
SECOND = 4889002843913964525


@pytest.fixture
def without_tools(tmp_path: Path) -> Path:
    """Return a folder that offers everything installed here except amanda-tools."""
    # All of site-packages: what our dependencies need is their business.
    for name in ("pluggy", "amanda", "amanda_core"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        package = Path(spec.origin).parent
        for path in package.parent.iterdir() if name == "pluggy" else [package]:
            if not path.name.startswith("amanda_tools") and not (tmp_path / path.name).exists():
                (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize(
    "statement",
    [
        "amanda.tools.mapping.MappingTool",
        "from amanda.tools.mapping import MappingTool",
        "from amanda import *; callback('keras', 'flops')",
    ],
)
def test_missing_amanda_tools_names_the_pip_command(without_tools: Path, statement: str) -> None:
    start = f"import sys; sys.path.insert(0, {str(without_tools)!r}); import amanda\n"
    done = python(f"{start}amanda.apply(amanda.Tool()); print(amanda.__version__)", "-I", "-S")
    assert done.returncode == 0, done.stderr
    done = python(start + statement, "-I", "-S")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("amanda_core.errors.MissingToolsError: ")
    assert "pip install amanda-tools" in last
    caught = f"{start}try:\n    {statement}\nexcept ImportError:\n    print('caught')"
    assert python(caught, "-I", "-S").stdout == "caught\n"


def test_comparing_dumps_without_amanda_tools_names_the_pip_command(without_tools: Path) -> None:
    start = f"import sys; sys.path.insert(0, {str(without_tools)!r})\n"
    call = f"{start}from amanda_core.cli import main; main(['diff', '.', '.'])"
    done = python(call, "-I", "-S")
    assert done.returncode == 2
    assert "No such command 'diff'. Other distributions bring more commands: " in done.stderr
    assert "pip install amanda-tools" in done.stderr


def test_the_help_of_the_command_line_imports_no_tools_nor_numpy_nor_rich() -> None:
    show = "from amanda_core.cli import app; app.parse(['--help'])"
    done = python(f"import sys; {show}; print(*sys.modules)")
    assert "List the installed tools" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "click" in loaded
    assert not loaded & {"torch", "tensorflow", "numpy", "rich"}
    # The module of the commands, whose docstrings are shown.
    tools = {name for name in loaded if name.partition(".")[0] == "amanda_tools"}
    assert tools <= {"amanda_tools", "amanda_tools.commands"}


def test_an_import_that_fails_inside_amanda_tools_is_not_taken_for_its_absence(
    without_tools: Path,
) -> None:
    package = without_tools / "amanda_tools"
    (package / "kit").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kit" / "mapping.py").write_text("import scientific_package_not_installed\n")
    start = f"import sys; sys.path.insert(0, {str(without_tools)!r}); import amanda\n"
    done = python(f"{start}amanda.tools", "-I", "-S")
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ModuleNotFoundError: No module named 'scientific_package_not_installed'"
