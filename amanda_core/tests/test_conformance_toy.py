"""The suite over the toy driver, which is a complete one."""

from __future__ import annotations

from amanda_core.testing import conformance

from .conformance_backend import ToyBackend

TestToy = conformance(ToyBackend)
