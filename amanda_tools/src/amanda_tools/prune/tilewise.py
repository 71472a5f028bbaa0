"""`PruneTiles`: whole columns, and rows of tiles of columns, that dense kernels can leave out.

Owns the rule of tile-wise sparsity (Guo et al., SC 2020), with single elements restored or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from amanda_tools.prune.collective import CollectivePruning
from amanda_tools.prune.pruning import Order

__all__ = ["PruneTiles", "tile_masks"]

Dimensions = Literal["both", "rows"]


class PruneTiles(CollectivePruning):
    """Prunes a model tile-wise: first columns of all weights, then rows of their tiles.

    A weight is a matrix whose columns are its outputs; a convolution's rows are its positions and
    input channels. Columns and rows are compared over the whole model, so the first execution is
    not pruned. The achieved sparsity is about the requested one, and is in the result.

    Args:
        sparsity: The fraction that is pruned, from 0 to 1.
        tile: How many columns that are kept a tile has.
        restored: The fraction of single elements, the largest of those pruned, that are restored.
            As many more are pruned tile-wise before (TEW).
        dimensions: `both`, or `rows` of tiles only (TW1).
        stages: Fractions to prune one after another in place of `sparsity`, which is the last.
        stage_steps: How many steps of the optimizer each stage has.

    Raises:
        ValueError: An option is not in its range.

    >>> tool = PruneTiles(0.75, tile=64)
    """

    name = "prune_tiles"

    def __init__(
        self,
        sparsity: float,
        tile: int = 128,
        restored: float = 0.0,
        dimensions: Dimensions = "both",
        stages: list[float] | None = None,
        stage_steps: int = 0,
    ) -> None:
        self.stages = [*(stages or []), sparsity]
        if any(not 0 <= stage <= 1 - restored for stage in self.stages) or restored < 0:
            raise ValueError(f"sparsity and restored must be from 0 to 1 together: {self.stages}")
        if tile < 1 or (len(self.stages) > 1 and stage_steps < 1):
            raise ValueError("tile must be positive, and stage_steps if there are stages")
        if dimensions not in get_args(Dimensions):
            raise ValueError(f"dimensions must be of both, rows, not {dimensions!r}")
        self.tile, self.restored, self.dimensions = tile, restored, dimensions
        self.stage_steps, self.sparsity = stage_steps, sparsity
        super().__init__(sparsity, True, len(self.stages) > 1)

    def fraction(self, step: int) -> float:
        """Return the fraction that is pruned after a number of steps of the optimizer."""
        return self.stages[min(step // max(self.stage_steps, 1), len(self.stages) - 1)]

    def is_due(self, step: int) -> bool:
        """Return True if masks are made again at the end of this step, counted from 1."""
        return self.fraction(step) != self.fraction(step - 1)

    def refuses(self, shape: tuple[int, ...], order: Order) -> str:
        """Return why a weight of this shape is not pruned, or an empty string."""
        return "" if order.known else "which of its axes is the output's is not known"

    def decide(self, magnitudes: Mapping[str, Any], orders: Mapping[str, Order]) -> dict[str, Any]:
        """Return which elements of each weight are kept."""
        import numpy as np

        matrices, shapes = [], []
        for key, values in magnitudes.items():
            # From output, input, positions to positions, input, output.
            kernel = orders[key].kernel
            moved = np.moveaxis(values, (0, 1), (-1, -2)) if kernel else values.swapaxes(-1, -2)
            shapes.append(moved.shape)
            whole = moved.reshape(-1, moved.shape[-1])
            matrices.append(whole)
        both = self.dimensions == "both"
        masks = tile_masks(matrices, 100 * self.present, self.tile, 100 * self.restored, both)
        found = {}
        for key, mask, shape in zip(magnitudes, masks, shapes, strict=True):
            moved = mask.reshape(shape)
            kernel = orders[key].kernel
            found[key] = np.moveaxis(moved, (-1, -2), (0, 1)) if kernel else moved.swapaxes(-1, -2)
        return found

    def options(self) -> dict[str, Any]:
        """Return what decides which elements are pruned."""
        names = ("stages", "tile", "restored", "dimensions", "stage_steps")
        return {name: getattr(self, name) for name in names}


def tile_masks(
    matrices: Sequence[Any],
    percent: float,
    tile: int,
    restored: float = 0.0,
    columns: bool = True,
) -> list[Any]:
    """Return which elements of matrices are kept, tile-wise.

    Args:
        matrices: Magnitudes of shape ``(rows, columns)``.
        percent: How many percent are pruned.
        tile: How many columns that are kept a tile has.
        restored: How many percent are restored, having been pruned in addition.
        columns: Whether whole columns are pruned before.
    """
    import numpy as np

    percent += restored
    if not percent:
        return [np.ones(matrix.shape, bool) for matrix in matrices]
    each = 100 - math.sqrt(10000 - 100 * percent) if columns else percent
    kept = [np.ones(matrix.shape[1], bool) for matrix in matrices]
    if columns:
        norms = [np.linalg.norm(matrix, axis=0) / len(matrix) for matrix in matrices]
        limit = np.percentile(np.concatenate(norms), each)
        kept = [norm > limit for norm in norms]
    tiles = []
    for matrix, there in zip(matrices, kept, strict=True):
        ends = np.flatnonzero(there)[tile - 1 :: tile] + 1
        tiles.append(np.split(matrix * there, ends[ends < matrix.shape[1]], axis=1))
    rows = [[np.linalg.norm(part, axis=1) / part.shape[1] for part in parts] for parts in tiles]
    limit = np.percentile(np.concatenate([norm for norms in rows for norm in norms]), each)
    masks = []
    for norms, parts, there in zip(rows, tiles, kept, strict=True):
        whole = [
            np.outer(norm > limit, np.ones(part.shape[1], bool))
            for norm, part in zip(norms, parts, strict=True)
        ]
        masks.append(np.hstack(whole) & there)
    if not restored:
        return masks
    pruned = [np.where(mask, -1.0, m) for mask, m in zip(masks, matrices, strict=True)]
    limit = np.percentile(np.concatenate([one.ravel() for one in pruned]), 100 - restored)
    return [mask | (one > limit) for mask, one in zip(masks, pruned, strict=True)]
