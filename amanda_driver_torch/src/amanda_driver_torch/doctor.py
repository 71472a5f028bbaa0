"""Diagnosis of this installation of the driver.

Owns the answers for people and for ``amanda doctor``. It instruments nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amanda_core.driver_kit import NATIVE
from amanda_core.interface import CoverageGap
from amanda_driver_torch.execution.native_plans import REFUSALS
from amanda_driver_torch.interception.coverage_limits import LIMITS
from amanda_driver_torch.interception.interceptor_choice import INTERCEPTORS
from amanda_driver_torch.torch_internals import extension

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """The interceptor that new sessions use, and its state.

    Attributes:
        name: ``native`` or ``function_mode``.
        why: Why it was chosen, as a sentence.
        missing: The other interceptor, if this installation does not have it, and why.
        limits: What the interceptor in use cannot see.
        hooks: Who registers hooks on backward nodes, as a sentence.
        in_python: Reasons for which the native interceptor has Python execute an operator that has
            a plan; empty with the other one, which always does.
        misplaced: Operators whose redirection is not as it should be; empty if all is well.
    """

    name: str
    why: str
    missing: dict[str, str]
    limits: Sequence[CoverageGap]
    hooks: str
    in_python: Sequence[str]
    misplaced: Sequence[str]

    def __str__(self) -> str:
        lines = [f"interceptor: {self.name} ({self.why})"]
        lines.append(f"hooks: {self.hooks}")
        lines += [f"not here: {name} ({why})" for name, why in self.missing.items()]
        lines += [f"not seen: {limit.what} ({limit.why})" for limit in self.limits]
        lines += [f"in Python: {why}" for why in self.in_python]
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
    in_python = [refusal.why for refusal in REFUSALS] if chosen.name == NATIVE else []
    return Diagnosis(
        name=chosen.name,
        why=chosen.why,
        missing=missing,
        limits=LIMITS[chosen.name],
        hooks=_hooks(chosen.name),
        in_python=in_python,
        misplaced=misplaced,
    )


def _hooks(interceptor: str) -> str:
    if interceptor != NATIVE:
        return f"Python registers them (as always with the {interceptor} interceptor)"
    from amanda_driver_torch.interception.native_interceptor import why_hooked_by_python

    why = why_hooked_by_python()
    return (
        f"Python registers them ({why})" if why else "the extension places them in torch's graphs"
    )
