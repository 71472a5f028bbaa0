"""The tutorial's tool runs on JAX as the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/tutorial.md"


@pytest.mark.slow
def test_the_tool_of_the_tutorial_runs_on_jax(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    for name in ("zeros.py", "on_jax.py"):
        block = re.search(rf"`{name}`:\n```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert block is not None
        (tmp_path / name).write_text(block[1])
    (shown,) = re.findall(r"^python on_jax.py  # (.*)$", text, re.MULTILINE)
    # The folder of the program is on its path, as for a reader.
    program = "import sys; sys.path.insert(0, '.'); exec(open('on_jax.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == shown, done.stderr
