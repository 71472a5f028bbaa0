"""Amanda's conformance suite over this driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from amanda_core.testing import conformance, core_tests

from .tinytape_backend import TinytapeBackend

TestConformance = conformance(TinytapeBackend)


def test_the_summary_that_is_published(tmp_path: Path) -> None:
    # The other way to run the suite: without a test module.
    report = tmp_path / "conformance.json"
    program = (
        "import sys, pathlib; from amanda_core.testing import run; "
        "sys.exit(run('tinytape_backend:TinytapeBackend', '-q', '-p', 'no:cacheprovider', "
        f"report=pathlib.Path({str(report)!r})))"
    )
    here = Path(__file__).parent
    # In its folder, so that Python finds the module of the backend.
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(here)!r}); {program}"],
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["conforms"] is True
    (found,) = written["backends"]
    assert found["namespaces"] == ["tinytape/0.1.0/eager"]
    assert sorted(found["tests"]["core"]["passed"]) == sorted(core_tests())
    assert found["capabilities"]["aligned_gradients"] == "passed"
    assert found["capabilities"]["scopes"] == "undeclared"
    assert "tinytape eager" in report.with_suffix(".md").read_text(encoding="utf-8")
