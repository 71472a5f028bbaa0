"""Renew the pages that are made of the sources, and build the site: `nox -s docs`."""

from __future__ import annotations

import subprocess
import sys

from .reference import ROOT, pages


def main(arguments: list[str]) -> int:
    """Write the pages; build with all warnings as errors, or serve."""
    for place, text in pages().items():
        place.write_text(text, "utf-8")
    command = ["serve"] if "--serve" in arguments else ["build", "--strict", "--clean"]
    return subprocess.run([sys.executable, "-m", "mkdocs", *command], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
