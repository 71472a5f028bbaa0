"""Diagnosis of this installation of the driver.

Owns the answers for people and for ``amanda doctor``. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amanda_core import CoverageGap
from amanda_core.interceptors import NATIVE
from amanda_driver_torch._entry.coverage_limits import LIMITS
from amanda_driver_torch._entry.interceptor_choice import INTERCEPTORS
from amanda_driver_torch._torch import extension

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """The interceptor that new sessions use, and its state.

    Attributes:
        name: ``native`` or ``function_mode``.
        why: Why it was chosen, as a sentence.
        missing: The other interceptor, if this installation does not have it, and why.
        limits: What the interceptor in use cannot see.
        misplaced: Operators whose redirection is not as it should be; empty if all is well.
    """

    name: str
    why: str
    missing: dict[str, str]
    limits: Sequence[CoverageGap]
    misplaced: Sequence[str]

    def __str__(self) -> str:
        lines = [f"interceptor: {self.name} ({self.why})"]
        lines += [f"not here: {name} ({why})" for name, why in self.missing.items()]
        lines += [f"not seen: {limit.what} ({limit.why})" for limit in self.limits]
        lines += [f"misplaced: {name}" for name in self.misplaced]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Return the interceptor in use, and check that torch's tables are as they should be.

    Raises:
        UnsupportedError: `AMANDA_TORCH_INTERCEPTOR` selects one that is not available.
    """
    chosen = INTERCEPTORS.choice()
    missing = {}
    if extension.native is None:
        missing[NATIVE] = extension.missing
    misplaced = extension.native.check() if extension.native is not None else []
    return Diagnosis(chosen.name, chosen.why, missing, LIMITS[chosen.name], misplaced)
