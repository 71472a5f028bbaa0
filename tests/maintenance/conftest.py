"""Makes the programs of `maintenance` importable, whose package lies in the root."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Not by the root on sys.path: a driver that is not installed would import as an empty namespace.
_FILE = Path(__file__).parents[2] / "maintenance/__init__.py"
_spec = importlib.util.spec_from_file_location("maintenance", _FILE)
assert _spec is not None
assert _spec.loader is not None
sys.modules["maintenance"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["maintenance"])
