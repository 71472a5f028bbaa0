"""Tools under a driver of a framework that they do not know: the program runs as without them."""

from __future__ import annotations

import json
import subprocess
import sys

#: Runs in a process in which neither framework can be imported: a tool may not guess one.
_PROGRAM = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "tensorflow"):
            raise AssertionError(f"a tool took the framework for {name}")

sys.meta_path.insert(0, Refuse())
from amanda_core import discovery
from amanda_core.testing import check_result, run_toy_program

plain, found = run_toy_program(steps=2), {}
needed = {"prune": {"sparsity": 0.5}, "mapping": {"rules": []}}
for name, point in discovery.tools().items():
    tool = point.load()(**needed.get(name, {}))
    assert run_toy_program(tool, steps=2) == plain, name
    found[name] = check_result(tool.result()) if hasattr(tool, "result") else None
print(json.dumps(found))
"""


def test_the_program_runs_under_every_tool() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"trace", "memory", "latency", "graph", "effective_path"} <= set(found)
    assert "not supported on toy/" in json.dumps(found["memory"])
