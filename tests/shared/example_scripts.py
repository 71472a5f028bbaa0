"""Loads the scripts of `examples/` and `maintenance/benchmarks` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["load_benchmark", "load_example"]

ROOT = Path(__file__).parents[2]


def load_example(path: str) -> Any:
    """Return the module of a script, by its path in `examples/` without the suffix."""
    return _load(ROOT / "examples" / f"{path}.py")


def load_benchmark(name: str) -> Any:
    """Return the module of a script in `maintenance/benchmarks` that imports none of the others."""
    return _load(ROOT / "maintenance/benchmarks" / f"{name}.py")


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for annotations.
    spec.loader.exec_module(module)
    return module
