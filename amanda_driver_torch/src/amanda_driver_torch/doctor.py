"""What this installation of the driver does, and whether all is in order.

Owns the answers for people and for ``amanda doctor``; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amanda_core import Blind
from amanda_core.interceptors import NATIVE
from amanda_driver_torch._entry.choice import INTERCEPTORS
from amanda_driver_torch._entry.limits import LIMITS
from amanda_driver_torch._torch import extension

__all__ = ["Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """Which interceptor new sessions use, and what is to be known of it.

    Attributes:
        name: ``native`` or ``function_mode``.
        why: A sentence that says why this one.
        missing: The other one, if this installation does not have it, and why not.
        limits: What the one that is used cannot see.
        misplaced: Operators whose redirection is not as it should be now; empty if all is well.
    """

    name: str
    why: str
    missing: dict[str, str]
    limits: Sequence[Blind]
    misplaced: Sequence[str]

    def __str__(self) -> str:
        lines = [f"interceptor: {self.name} ({self.why})"]
        lines += [f"not here: {name} ({why})" for name, why in self.missing.items()]
        lines += [f"not seen: {limit.what} ({limit.why})" for limit in self.limits]
        lines += [f"misplaced: {name}" for name in self.misplaced]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Say which interceptor is used, and look whether torch's tables are as they should be.

    Raises:
        UnsupportedError: `AMANDA_TORCH_INTERCEPTOR` asks for one that is not available.
    """
    chosen = INTERCEPTORS.choice()
    missing = {}
    if extension.native is None:
        missing[NATIVE] = extension.missing
    misplaced = extension.native.check() if extension.native is not None else []
    return Diagnosis(chosen.name, chosen.why, missing, LIMITS[chosen.name], misplaced)
