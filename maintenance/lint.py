"""Check rules, formatting and types of all sources: `nox -s lint`.

`--fix` fixes what ruff can. All three checks run, whatever the first one finds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Folders with sources and tests of one distribution each.
DISTRIBUTIONS = [
    *("amanda_core", "amanda_tools", "amanda_driver_torch", "amanda_driver_tf"),
    *("amanda_driver_jax", "amanda_driver_mindspore", "amanda_driver_mxnet"),
    "amanda_driver_onnxruntime",
    *("examples/driver_numpy", "examples/tool_activation_ranges"),
]


def main() -> int:
    """Run all checks; return 1 if one complains."""
    fix = "--fix" in sys.argv[1:]
    commands = {
        "ruff check": ["ruff", "check", *(["--fix"] if fix else []), "."],
        "ruff format": ["ruff", "format", *([] if fix else ["--check"]), "."],
        "mypy": ["mypy", *typed(), "conftest.py", "noxfile.py"],
    }
    failed = []
    for name, command in commands.items():
        print(f"$ {' '.join(command)}", flush=True)
        program = Path(sys.executable).with_name(command[0])
        if subprocess.run([program, *command[1:]], cwd=ROOT).returncode:
            failed.append(name)
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def typed() -> list[str]:
    """Return the folders whose types are checked; mypy refuses one without sources."""
    scripts = sorted(
        folder.relative_to(ROOT).as_posix()
        for folder in (ROOT / "examples").iterdir()
        # The gallery has tools as their users write them.
        if folder.is_dir() and folder.name != "gallery" and not (folder / "pyproject.toml").exists()
    )
    folders = [f"{name}/{part}" for name in DISTRIBUTIONS for part in ("src", "tests")]
    every = [*folders, "tests", "maintenance", "docs/screenshots", *scripts]
    return [name for name in every if any(ROOT.glob(f"{name}/**/*.py"))]


if __name__ == "__main__":
    sys.exit(main())
