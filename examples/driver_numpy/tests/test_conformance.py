"""Amanda's conformance suite over this driver."""

from __future__ import annotations

from amanda_core.testing import conformance

from .tinytape_backend import TinytapeBackend

TestConformance = conformance(TinytapeBackend)
