"""PyTorch's tensors: of all types, empty, sparse, huge, in modules, recomputed."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

import amanda
from activation_ranges import ActivationRanges, Range, Ranges

torch = pytest.importorskip("torch")


def watched(run: Callable[[], object], tool: ActivationRanges | None = None) -> Ranges:
    tool = tool or ActivationRanges()
    with amanda.apply(tool):
        run()
    return tool.result()


def only(run: Callable[[], object], tool: ActivationRanges | None = None) -> Range:
    (found,) = watched(run, tool).ranges
    return found


def test_what_is_not_finite_is_counted_and_left_out_of_the_range() -> None:
    values = torch.tensor([np.nan, np.inf, -np.inf, 2.0, -3.0, np.nan])
    result = watched(lambda: torch.neg(values))
    (found,) = result.ranges
    assert (found.lowest, found.highest) == (-2.0, 3.0)
    assert found.nan == 2
    assert found.infinite == (1, 1)
    assert found.elements == 6
    json.loads(result.to_json(), parse_constant=pytest.fail)


def test_nothing_finite() -> None:
    result = watched(lambda: torch.neg(torch.full((4,), np.nan)))
    (found,) = result.ranges
    assert (found.lowest, found.highest, found.mean, found.zeros) == (None, None, None, None)
    assert found.nan == 4
    assert found.percentiles == {}
    with pytest.raises(ValueError, match="no finite value"):
        found.quantization()
    json.loads(result.to_json(), parse_constant=pytest.fail)
    str(result.table())


def test_empty_tensors() -> None:
    found = only(lambda: torch.relu(torch.empty(0, 3)))
    assert (found.executions, found.elements, found.lowest) == (1, 0, None)


def test_whole_numbers_stay_exact() -> None:
    large = 2**62 + 1
    found = only(lambda: torch.neg(torch.tensor([-large, 5])))
    assert (found.lowest, found.highest) == (-5, large)
    assert isinstance(found.highest, int)
    assert found.dtypes == ("int64",)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int8", "uint8"])
def test_types_of_elements(dtype: str) -> None:
    values = torch.tensor([1.0, 0.0, 3.0]).to(getattr(torch, dtype))
    found = only(lambda: torch.mul(values, 2))
    assert (found.lowest, found.highest) == (0, 6)


def test_ranges_wider_than_a_number() -> None:
    largest = float(np.finfo(np.float64).max)
    values = torch.tensor([-largest, largest, largest], dtype=torch.float64)
    result = watched(lambda: torch.mul(values, 1.0))
    (found,) = result.ranges
    assert (found.lowest, found.highest) == (-largest, largest)
    assert found.mean == pytest.approx(largest / 3)
    assert found.edges == ()
    json.loads(result.to_json(), parse_constant=pytest.fail)


def test_values_without_a_range_are_left_out_and_named() -> None:
    def run() -> None:
        torch.relu(torch.ones(2))
        torch.gt(torch.ones(2), 0)
        torch.mul(torch.ones(2, dtype=torch.complex64), 1j)
        torch.mul(torch.ones(2, device="meta"), 2)

    result = watched(run)
    assert [each.word for each in result.ranges] == ["relu"]
    reasons = " ".join(result.left_out.values())
    assert "bool" in reasons
    assert "left out values of" in result.table().title


def test_each_output_has_its_range() -> None:
    result = watched(lambda: torch.topk(torch.tensor([3.0, 9.0, 1.0]), 2))
    values, places = result.ranges
    assert (values.lowest, values.highest) == (3.0, 9.0)
    assert (places.lowest, places.highest) == (0, 1)
    assert (values.title, places.title) == ("topk", "topk:1")


def test_modules() -> None:
    class Net(torch.nn.Module):  # type: ignore[name-defined, misc]  # Imported if it is there.
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.second = torch.nn.Linear(4, 2)

        def forward(self, x: object) -> object:
            return self.second(torch.relu(self.first(x)))

    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 4)
    result = watched(lambda: net(x), ActivationRanges(by="module"))
    titles = [each.title for each in result.ranges]
    assert len(titles) == 3
    assert [title.rpartition(".")[2] for title in titles][::2] == ["first", "second"]
    first = result.ranges[0]
    assert first.highest == net.first(x).max().item()


def test_recomputed_values_are_not_counted_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        checkpoint(torch.relu, x, use_reentrant=False).sum().backward()

    found = only(run, ActivationRanges(types=["relu"]))
    assert found.executions == 1


def test_of_large_outputs_a_sample_is_looked_at_and_all_extremes_are_found() -> None:
    values = torch.zeros(1000, 1000)
    values[123, 456] = 7.0
    values[654, 321] = -5.0
    # Not contiguous, either.
    before = torch.random.get_rng_state()
    found = only(lambda: torch.neg(values.t()), ActivationRanges(types=["neg"], sample=500))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (found.lowest, found.highest) == (-7.0, 5.0)
    assert found.elements == 1_000_000
    assert sum(found.counts) == pytest.approx(500)


def test_records_do_not_grow_with_executions() -> None:
    tool = ActivationRanges(types=["relu"])
    x = torch.randn(64)

    def taken() -> int:
        with amanda.apply(tool):
            for _ in range(50):
                torch.relu(x)
        (record,) = tool._records.values()
        return record.sketch.nbytes

    assert taken() == taken()
    assert only(lambda: None, tool).executions == 100


def test_inputs_and_gradients_are_as_without_the_tool() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    x = torch.randn(3, 4)

    def gradients() -> list[object]:
        net.zero_grad()
        net(x).sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    plain = gradients()
    with amanda.apply(ActivationRanges()):
        under = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))
