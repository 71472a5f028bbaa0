"""Which magnitudes are pruned: the smallest, and of equal ones the first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amanda_tools.prune import numpy_mask, torch_mask


def by_sorting(weight: torch.Tensor, axes: list[int], count: int, batch: int) -> torch.Tensor:
    """Return the mask by a stable sort of all magnitudes."""
    ordered = weight.permute(axes)
    rows = ordered.abs().double().flatten(batch).reshape(-1, ordered[(0,) * batch].numel())
    mask = torch.ones_like(rows)
    for row, kept in zip(rows.tolist(), mask, strict=True):
        # Python's sort is stable. NaN comes last, as in NumPy and torch.
        order = sorted(range(len(row)), key=lambda i: (row[i] != row[i], row[i]))
        kept[order[:count]] = 0
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return mask.reshape(ordered.shape).permute(back).to(weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("special", [(), (float("nan"),), (float("nan"), float("inf"), 0.0, -0.0)])
@pytest.mark.parametrize(("axes", "batch"), [([0, 1, 2], 0), ([2, 0, 1], 0), ([0, 2, 1], 1)])
def test_the_smallest_and_of_equal_ones_the_first(
    dtype: torch.dtype, special: tuple[float, ...], axes: list[int], batch: int
) -> None:
    for distinct in (2, 5, 1000):
        weight = torch.randint(-distinct, distinct, (3, 4, 5)).to(dtype)
        for at, value in enumerate(special):
            weight.view(-1)[7 * at :: 11] = value
        size = weight[(0,) * batch].numel()
        for count in (0, 1, size // 2, size - 1, size):
            expected = by_sorting(weight, axes, count, batch)
            assert torch.equal(torch_mask(weight, axes, count, batch), expected)
            if dtype is not torch.bfloat16:  # NumPy has none.
                found = numpy_mask(weight.numpy(), axes, count, batch)
                assert np.array_equal(found, expected.numpy())
