"""The versions of torch that this driver was tested with.

`docs/support.md` shows the results. Does not import torch.
"""

from __future__ import annotations

from amanda_core.framework_versions import FrameworkVersions

__all__ = ["GRAPHS_TRIED", "VARIABLE", "VERSIONS"]

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
GRAPHS_TRIED = ("2.13",)
