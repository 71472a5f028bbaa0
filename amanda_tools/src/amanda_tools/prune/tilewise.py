"""`PruneTiles`: whole columns, and rows of tiles of columns, that dense kernels can leave out.

Owns the rule of tile-wise sparsity (Guo et al., SC 2020), with single elements restored or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from amanda_tools.prune.order import Order
from amanda_tools.prune.scores import Score, ScoredPruning, check_choice

__all__ = ["PruneTiles", "tile_masks"]

Dimensions = Literal["both", "rows"]


class PruneTiles(ScoredPruning):
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
        score: What norms are taken of: the `magnitude` of elements, or `taylor`, the squares of
            their products with their gradients.

    Raises:
        ValueError: An option is not in its range.

    >>> tool = PruneTiles(0.75, tile=64)
    """

    name = "prune_tiles"
    saved = ("stages", "tile", "restored", "dimensions", "stage_steps", "score")

    def __init__(
        self,
        sparsity: float,
        tile: int = 128,
        restored: float = 0.0,
        dimensions: Dimensions = "both",
        stages: list[float] | None = None,
        stage_steps: int = 0,
        score: Score = "magnitude",
    ) -> None:
        self.stages = [*(stages or []), sparsity]
        if any(not 0 <= stage <= 1 - restored for stage in self.stages) or restored < 0:
            raise ValueError(f"sparsity and restored must be from 0 to 1 together: {self.stages}")
        if tile < 1 or (len(self.stages) > 1 and stage_steps < 1):
            raise ValueError("tile must be positive, and stage_steps if there are stages")
        check_choice("dimensions", dimensions, Dimensions)
        self.tile, self.restored, self.dimensions = tile, restored, dimensions
        self.stage_steps = stage_steps
        super().__init__(sparsity, True, len(self.stages) > 1, score)
        self.across_layers = True

    def fraction(self, step: int) -> float:
        """Return the fraction that is pruned after a number of steps of the optimizer."""
        return self.stages[min(step // max(self.stage_steps, 1), len(self.stages) - 1)]

    def refuses(self, shape: tuple[int, ...], order: Order) -> str:
        """Return why a weight of this shape is not pruned, or an empty string."""
        return "" if order.known else "which of its axes is the output's is not known"

    def decide(self, scores: Mapping[str, Any], orders: Mapping[str, Order]) -> dict[str, Any]:
        """Return which elements of each weight are kept."""
        import numpy as np

        outputs = {key: 0 if orders[key].kernel else -2 for key in scores}
        moved = {key: np.moveaxis(values, outputs[key], -1) for key, values in scores.items()}
        matrices = [values.reshape(-1, values.shape[-1]) for values in moved.values()]
        both = self.dimensions == "both"
        masks = tile_masks(matrices, 100 * self.present, self.tile, 100 * self.restored, both)
        return {
            key: np.moveaxis(mask.reshape(moved[key].shape), -1, outputs[key])
            for key, mask in zip(scores, masks, strict=True)
        }


def tile_masks(
    matrices: Sequence[Any],
    percent: float,
    tile: int,
    restored: float = 0.0,
    columns: bool = True,
) -> list[Any]:
    """Return which elements of matrices are kept, tile-wise.

    Args:
        matrices: Scores of shape ``(rows, columns)``.
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
