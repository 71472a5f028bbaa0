"""Static pruning of weights by magnitude."""

from amanda_tools.kit.weights.coverage import UnreachedWeight
from amanda_tools.prune.masks import numpy_mask, torch_mask
from amanda_tools.prune.result import PrunedWeight, PruneResult
from amanda_tools.prune.tilewise import PruneTiles, tile_masks
from amanda_tools.prune.tool import Prune
from amanda_tools.prune.vectorwise import PruneNM

__all__ = [
    "Prune",
    "PruneNM",
    "PruneResult",
    "PruneTiles",
    "PrunedWeight",
    "UnreachedWeight",
    "numpy_mask",
    "tile_masks",
    "torch_mask",
]
