"""Modules of torch whose frames only call what the program asked for. Does not import torch."""

from __future__ import annotations

#: Their frames are left out of tracebacks. Other releases may lack some.
WRAPPERS = (
    *("torch.nn.modules.module", "torch.nn.modules.container", "torch._compile"),
    *("torch.utils._contextlib", "torch._ops", "torch._dynamo", "torch.amp"),
)
