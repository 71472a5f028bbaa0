"""The versions of torch that this driver was tested with.

`docs/support.md` shows the results. Does not import torch.
"""

from __future__ import annotations

from amanda_core.framework_versions import FrameworkVersions

__all__ = ["GRAPHS_TRIED", "VARIABLE", "VERSIONS", "are_graphs_tried"]

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
