"""Print docstrings, drawn at random from the sources of each member, to judge their prose.

`python -m maintenance.packages.docstrings [SEED] [--count 10]`; the seed defaults to the commit's
hash.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = (
    "amanda_core",
    "amanda_driver_jax",
    "amanda_driver_mindspore",
    "amanda_driver_mxnet",
    "amanda_driver_onnxruntime",
    "amanda_driver_tf",
    "amanda_driver_torch",
    "amanda_tools",
)


def docstrings(member: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each docstring in a member's sources."""
    for path in sorted((ROOT / member / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    line = getattr(node, "lineno", 1)
                    yield f"{path.relative_to(ROOT)}:{line}", text


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?")
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    seed = arguments.seed
    if seed is None:
        command = ["git", "rev-parse", "HEAD"]
        seed = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
    print(f"seed {seed}")
    for member in MEMBERS:
        found = list(docstrings(member))
        drawn = random.Random(seed).sample(found, min(arguments.count, len(found)))
        print(f"\n{member}: {len(drawn)} of {len(found)}")
        for place, text in drawn:
            print(f"\n{place}\n    " + text.replace("\n", "\n    "))


if __name__ == "__main__":
    main()
