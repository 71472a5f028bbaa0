"""Class of the machine and versions of the packages; nothing that identifies the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["cores", "machine", "versions"]

PACKAGES = ["amanda-core", "amanda-driver-torch", "torch", "transformers", "nnsight", "torchlens"]


def machine() -> dict[str, str | int | float]:
    """Return processor, cores, memory, system, and the load at the start."""
    facts: dict[str, str | int | float] = {
        "processor": _processor(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if hasattr(os, "sysconf"):
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        facts["memory (GiB)"] = round(size / 2**30)
    if hasattr(os, "getloadavg"):
        # With a load above one per core, only the processor times are meaningful.
        facts["load when it began"] = round(os.getloadavg()[0], 1)
    return facts


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
