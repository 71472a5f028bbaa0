"""Test support for authors of tools and of drivers.

Try a tool without a framework by `run_toy_program` and `check_result`. Test a driver with the
conformance kit: write a `Backend`, then ``TestConformance = conformance(MyBackend)`` in a test
module, or run ``pytest -p amanda_core.testing.plugin --pyargs amanda_core.testing.suite
--amanda-backend=m:Name``. The engine never imports this package, which needs pytest.
"""

from __future__ import annotations

import pytest

# Before their import, so that pytest shows the values in their failing assertions.
pytest.register_assert_rewrite("amanda_core.testing.suite")

from amanda_core.testing.kit.backend import Backend, Gradients, Transformed  # noqa: E402
from amanda_core.testing.kit.capabilities import CAPABILITIES, needs  # noqa: E402
from amanda_core.testing.kit.conformance import conformance, core_tests, run  # noqa: E402
from amanda_core.testing.kit.models import MODELS, Model, Node, Value, numbers  # noqa: E402
from amanda_core.testing.kit.oracle import Edits, differentiate, evaluate  # noqa: E402
from amanda_core.testing.kit.program import Program, function_of, source_of  # noqa: E402
from amanda_core.testing.kit.rig import Built, Rig  # noqa: E402
from amanda_core.testing.kit.trial import (  # noqa: E402
    OPERATORS,
    ToyRun,
    check_result,
    run_toy_program,
)

__all__ = [
    "CAPABILITIES",
    "MODELS",
    "OPERATORS",
    "Backend",
    "Built",
    "Edits",
    "Gradients",
    "Model",
    "Node",
    "Program",
    "Rig",
    "ToyRun",
    "Transformed",
    "Value",
    "check_result",
    "conformance",
    "core_tests",
    "differentiate",
    "evaluate",
    "function_of",
    "needs",
    "numbers",
    "run",
    "run_toy_program",
    "source_of",
]
