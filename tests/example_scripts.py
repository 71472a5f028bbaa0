"""Loads the scripts of `examples/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["load_example"]

FOLDER = Path(__file__).parents[1] / "examples"


def load_example(path: str) -> Any:
    """Return the module of a script, by its path in `examples/` without the suffix."""
    spec = importlib.util.spec_from_file_location(Path(path).name, FOLDER / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where dataclasses look for annotations.
    spec.loader.exec_module(module)
    return module
