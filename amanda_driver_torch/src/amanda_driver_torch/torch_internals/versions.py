"""The versions of torch that this driver was tested with.

`docs/support.md` shows the results. Does not import torch.
"""

from __future__ import annotations

import os
import re

from amanda_core.driver_kit import FrameworkVersions
from amanda_core.interface import ConfigError

#: Environment variable that selects an interceptor.
VARIABLE = "AMANDA_TORCH_INTERCEPTOR"

VERSIONS = FrameworkVersions(
    framework="PyTorch",
    module="torch",
    distributions=("torch",),
    oldest="2.10",
    newest="2.15.0",
    driver="amanda-driver-torch",
    variable=VARIABLE,
    self_test="amanda_driver_torch.self_test",
)

#: Releases, ``major.minor``, whose compiled callables were tried: private parts of Dynamo are used.
GRAPHS_TRIED = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")


def are_graphs_tried(release: str) -> bool:
    """Return True if compiled callables of a release, such as ``2.13.0+cpu``, were tried."""
    return ".".join(release.split(".")[:2]) in GRAPHS_TRIED


#: Environment variable: with 0, Python registers all hooks.
HOOKS_VARIABLE = "AMANDA_TORCH_NATIVE_HOOKS"

#: Releases in whose graphs the extension places hooks itself: it depends on their layout in memory,
#: so all tests have run with each of them.
HOOKS_TRIED = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")

#: What follows the number of a release that PyTorch itself has built, such as ``+cpu``.
_OWN_BUILD = re.compile(r"(cpu|xpu|cu\d+|rocm\d+)(\.\w+)*")


def are_hooks_tried(build: str) -> bool:
    """Return True for a build of a tried release, such as ``2.13.0+cpu``, but not for others."""
    release, _, suffix = build.partition("+")
    return release in HOOKS_TRIED and (not suffix or _OWN_BUILD.fullmatch(suffix) is not None)


def why_hooked_by_python(build: str) -> str:
    """Return why the extension places no hooks in the graphs of a build; empty if it does.

    Raises:
        ConfigError: The environment variable has another value than 0 and 1.
    """
    value = os.environ.get(HOOKS_VARIABLE) or "1"
    if value not in ("0", "1"):
        raise ConfigError(f"{HOOKS_VARIABLE} must be 0 or 1, but is {value!r}")
    if value == "0":
        return f"{HOOKS_VARIABLE}=0 is set"
    if not are_hooks_tried(build):
        tried = ", ".join(HOOKS_TRIED)
        return f"graphs of PyTorch {build} were not tried, only those of {tried}"
    return ""
