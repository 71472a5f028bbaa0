"""Amanda's conformance suite over this driver."""

from __future__ import annotations

from amanda_core.testing import conformance

from .jax_backends import Eager, Jit

TestEager = conformance(Eager)
TestJit = conformance(Jit)
