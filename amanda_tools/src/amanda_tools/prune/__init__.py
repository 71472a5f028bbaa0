"""Static pruning of weights by magnitude."""

from amanda_tools.prune.masks import numpy_mask, torch_mask
from amanda_tools.prune.result import PrunedWeight, PruneResult
from amanda_tools.prune.tool import Prune
from amanda_tools.weight_coverage import UnreachedWeight

__all__ = [
    "Prune",
    "PruneResult",
    "PrunedWeight",
    "UnreachedWeight",
    "numpy_mask",
    "torch_mask",
]
