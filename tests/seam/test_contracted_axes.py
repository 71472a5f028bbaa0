"""Which axes of a weight a product of PyTorch sums over: tools against NumPy's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from contraction_cases import CASES, TOOLS, Case

import amanda
from amanda_core import OpContext

F = torch.nn.functional


def _einsum(case: Case) -> Callable[[Any, Any], Any]:
    return lambda x, w: torch.einsum(case.equation, *((w, x) if case.swapped else (x, w)))


ROWS = torch.tensor([2, 3, 5], dtype=torch.int32)

#: Name -> a product, and how PyTorch computes it.
PRODUCTS: dict[str, tuple[Case, Callable[[Any, Any], Any]]] = {
    **{name: (case, _einsum(case)) for name, case in CASES.items()},
    "ellipsis": (
        Case("btd,dnh->btnh", (2, 5, 4), (4, 2, 3), "IOO"),
        lambda x, w: torch.einsum("...d,dnh->...nh", x, w),
    ),
    "implicit": (
        Case("bd,dn->bn", (5, 4), (4, 6), "IO"),
        lambda x, w: torch.einsum("bd,dn", x, w),
    ),
    "sublists": (
        Case("bd,dnh->bnh", (5, 4), (4, 2, 3), "IOO"),
        lambda x, w: torch.einsum(x, [0, 1], w, [1, 2, 3], [0, 2, 3]),
    ),
    "three": (
        Case("bd,dr->br", (5, 4), (4, 3), "IO"),
        lambda x, w: torch.einsum("bd,dr,re->be", x, w, torch.eye(3)),
    ),
    "tensordot": (
        Case("bd,ndh->bnh", (5, 4), (3, 4, 2), "OIO"),
        lambda x, w: torch.tensordot(x, w, dims=([1], [1])),
    ),
    "tensordot of two": (
        Case("btnh,nhd->btd", (2, 5, 2, 4), (2, 4, 3), "IIO"),
        lambda x, w: torch.tensordot(x, w, 2),
    ),
    "matmul": (CASES["experts"], torch.matmul),
    "bmm": (CASES["experts"], torch.bmm),
    "baddbmm": (CASES["experts"], lambda x, w: torch.baddbmm(torch.zeros(3, 5, 2), x, w)),
    "addbmm": (
        Case("ebd,edf->bf", (3, 5, 4), (3, 4, 2), "IIO"),
        lambda x, w: torch.addbmm(torch.zeros(5, 2), x, w),
    ),
    "broadcast": (CASES["all_for_all"], torch.matmul),
    "vector": (Case("d,edf->ef", (4,), (3, 4, 2), "OIO"), torch.matmul),
    "left": (Case("hd,db->hb", (4, 5), (6, 4), "OI", True), lambda x, w: w @ x),
    "inner": (Case("bd,ehd->beh", (5, 4), (3, 2, 4), "OOI"), torch.inner),
    "multi_dot": (
        Case("bd,df->bf", (5, 4), (4, 6), "IO"),
        lambda x, w: torch.linalg.multi_dot([x, w, torch.eye(6)]),
    ),
    "bilinear": (
        Case("bd,ode->boe", (5, 4), (3, 4, 2), "OII"),
        lambda x, w: torch.stack([F.bilinear(x, row.expand(5, 2), w) for row in torch.eye(2)], -1),
    ),
    "viewed": (
        Case("bd,dnh->bnh", (5, 4), (4, 2, 3), "IOO"),
        lambda x, w: (x @ w.view(4, 6)).view(5, 2, 3),
    ),
    "split": (
        Case("bd,dm->bm", (5, 4), (4, 6), "IO"),
        lambda x, w: torch.einsum("bd,dnh->bnh", x, w.view(4, 2, 3)).reshape(5, 6),
    ),
    "linear of a view": (
        Case("bd,nhd->bnh", (5, 4), (2, 3, 4), "OOI"),
        lambda x, w: F.linear(x, w.view(6, 4)).view(5, 2, 3),
    ),
    "picked": (
        CASES["experts"],
        lambda x, w: torch.stack([one @ w[n] for n, one in enumerate(x)]),
    ),
}


class Model(torch.nn.Module):
    """A product with a weight."""

    def __init__(self, weight: Any, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.w, self.run = torch.nn.Parameter(torch.as_tensor(weight)), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.run(x, self.w)
        return result


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_has_the_axes_of_a_weight(tool: str, name: str) -> None:
    case, run = PRODUCTS[name]
    make, edited = TOOLS[tool]
    x, weight = case.operands
    model, used = Model(weight, run), make()
    with amanda.apply(used), torch.no_grad():
        found = model(torch.tensor(x)).numpy()
    assert "100.0% of the parameters reached" in str(used.result().table())
    np.testing.assert_allclose(found, case.of(x, edited(case, weight)), rtol=1e-4, atol=1e-4)


def test_the_second_weight_of_a_chain_sums_over_what_the_first_one_makes() -> None:
    found: dict[Any, Any] = {}

    class Letters(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: OpContext) -> None:
            found.update({place: weight.letters for place, weight in context.weights.items()})

    x, first, second = torch.ones(5, 4), torch.ones(4, 3), torch.ones(3, 2)
    first, second = torch.nn.Parameter(first), torch.nn.Parameter(second)
    with amanda.apply(Letters()):
        torch.einsum("re,bd,dr->be", second, x, first)
    assert found == {(1, 0): "IO", (1, 2): "IO"}


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this PyTorch has no grouped product")
def test_groups_of_rows_have_a_matrix_each() -> None:
    x, weight = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(2, 16, 8)
    model = Model(
        weight.bfloat16(), lambda x, w: torch._grouped_mm(x, w, torch.tensor([3, 8]).int())
    )
    make, edited = TOOLS["prune"]
    case = Case("bd,edf->ebf", (8, 16), (2, 16, 8), "GIO")
    with amanda.apply(tool := make()), torch.no_grad():
        try:
            found = model(x)
        except RuntimeError as error:  # pragma: no cover - by the machine
            pytest.skip(str(error))
    kept = torch.tensor(edited(case, weight.bfloat16().float().numpy()))
    expected = torch.cat([x[:3].float() @ kept[0], x[3:].float() @ kept[1]])
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    assert "100.0% of the parameters reached" in str(tool.result().table())
