"""Fault injection: true bits of every dtype, counts, replay, and values written by hand."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core.errors import ResultError, ToolError
from amanda_tools.faults import Fault, InjectFaults, run_campaign, wilson_interval
from amanda_tools.faults.models import apply_model, fields_of

pytestmark = pytest.mark.one_interceptor


def relu(x: torch.Tensor, *tools: amanda.Tool) -> torch.Tensor:
    with amanda.apply(*tools):
        return F.relu(x)


def flip(bits: Any, **options: Any) -> InjectFaults:
    return InjectFaults(["relu"], bits=bits, mode="per_layer", **options)


def test_a_flip_of_one_bit_of_one() -> None:
    one = torch.tensor([1.0])
    assert relu(one, flip([30])).item() == math.inf
    assert relu(one, flip("sign")).item() == -1.0
    assert relu(one, flip([22])).item() == 1.5


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32, torch.uint8),
    ],
)
def test_each_bit_of_each_dtype_flips_and_a_second_flip_restores_it(dtype: torch.dtype) -> None:
    x = torch.arange(1, 9).to(torch.float32).to(dtype)
    width = 8 * dtype.itemsize

    def moved(*tools: amanda.Tool) -> torch.Tensor:
        with amanda.apply(*tools):
            return x.reshape(2, 4)

    for bit in range(width):
        options: Any = {"ops": ["reshape"], "bits": [bit], "mode": "per_layer", "count": 8}
        once = moved(InjectFaults(**options))
        raw = np.frombuffer(bytes_of(x), f"u{dtype.itemsize}")
        assert bytes_of(once) == (raw ^ raw.dtype.type(1 << bit)).tobytes()
        assert once.dtype == dtype
        assert bytes_of(moved(InjectFaults(**options), InjectFaults(**options))) == bytes_of(x)


def test_stuck_bits_zero_noise_scale_and_values() -> None:
    x = torch.full((4096,), 3.0)

    def changed(model: Any, **options: Any) -> torch.Tensor:
        count = options.pop("count", 4096)
        return relu(
            x, InjectFaults(["relu"], model=model, mode="per_layer", count=count, **options)
        )

    (raw,) = struct.unpack("<I", struct.pack("<f", 3.0))
    for model, bits in (("stuck_at_0", raw & ~(1 << 22)), ("stuck_at_1", raw | 1 << 21)):
        bit = 22 if model == "stuck_at_0" else 21
        (value,) = struct.unpack("<f", struct.pack("<I", bits))
        assert changed(model, bits=[bit]).eq(value).all()
    assert changed("zero", count=7).eq(0).sum() == 7
    assert changed("scale", amount=2.5).eq(7.5).all()
    assert changed("value", amount=-6.25).eq(-6.25).all()
    noise = changed("noise", amount=0.5) - 3.0
    assert abs(float(noise.mean())) < 4 * 0.5 / 64
    assert abs(float(noise.std()) - 0.5) < 4 * 0.5 / math.sqrt(2 * 4096)
    assert changed("random", amount=2.0).abs().le(2).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: str) -> None:
    values = np.random.default_rng(0).normal(0, 20, 512)
    kind: Any = getattr(torch, dtype)
    array = np.zeros(1, np.uint16 if dtype == "bfloat16" else np.uint8)
    for value in values:
        place = np.array([0])
        apply_model("value", array, dtype, place, place, value, None)
        assert bytes(array) == bytes_of(torch.tensor([value], dtype=torch.float32).to(kind))


def test_rates_are_binomial() -> None:
    x, rate = torch.ones(100_000), 0.003
    tool = InjectFaults(["relu"], rate=rate, bits="mantissa")
    with amanda.apply(tool):
        numbers = []
        for run in range(20):
            tool.begin_run(run)
            numbers.append(int((F.relu(x) != 1).sum()))
    sigma = math.sqrt(100_000 * rate * (1 - rate))
    assert all(abs(number - 300) < 4 * sigma for number in numbers)
    assert abs(sum(numbers) - 6000) < 4 * sigma * math.sqrt(20)
    assert len(set(numbers)) > 5
    assert len(tool.faults) == sum(numbers)


def test_one_fault_per_sample_and_one_per_run() -> None:
    x = torch.ones(6, 3, 5)
    out = relu(x, InjectFaults(["relu"], mode="per_sample", model="zero"))
    assert out.eq(0).sum(dim=(1, 2)).tolist() == [1] * 6

    model, hit = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), []
    tool = InjectFaults(["relu"], mode="per_run", model="zero")
    with amanda.apply(tool):
        assert model(x).eq(1).all()  # The run that shows which operators there are.
        for run in range(1, 40):
            tool.begin_run(run)
            assert model(x).eq(0).sum() == 1
            hit.append(tool.faults[-1].op_id)
    assert len(set(hit)) == 3


@pytest.mark.parametrize("site", ["input", "weight", "output", "gradient"])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_program_without_numbered_runs_is_one_run(site: Any, stepped: bool) -> None:
    model = nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tool, parts = InjectFaults(mode="per_run", count=3, bits=[30], site=site), []
    with amanda.apply(tool):
        for _ in range(5):
            model(torch.ones(3, 10)).sum().backward()
            if stepped:
                optimizer.step()
            parts.append(len(tool.faults))
    assert parts == [0, 3, 3, 3, 3]
    assert "3 faults in 1 run" in str(tool.result().table())
    assert tool.result().notes == []


def test_a_program_of_one_part_says_that_it_had_no_faults() -> None:
    tool = InjectFaults(["relu"], mode="per_run")
    with amanda.apply(tool):
        F.relu(F.relu(torch.ones(3)))
    assert "NO faults" in str(tool.result().table())


def test_faults_that_meet_no_execution_are_counted() -> None:
    faults = [Fault(run, 5, 0, 0, 1, 0, 1) for run in range(3)]
    tool = InjectFaults(["relu"], replay=faults)
    with amanda.apply(tool):
        F.relu(torch.ones(3))
    (note,) = tool.result().notes
    assert note == "3 of the 3 faults to replay met no execution of run 0"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.mark.parametrize("site", ["input", "weight", "output", "gradient"])
def test_faults_are_replayed_and_leave_nothing(site: Any, tmp_path: Path) -> None:
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def run(tool: InjectFaults) -> list[bytes]:
        model = network()
        before = [bytes_of(parameter.detach()) for parameter in model.parameters()]
        with amanda.apply(tool):
            output = model(x)
            output.square().sum().backward()
        assert [bytes_of(parameter.detach()) for parameter in model.parameters()] == before
        gradients = [parameter.grad for parameter in model.parameters()]
        return [bytes_of(value.detach()) for value in (output, *gradients) if value is not None]

    first = InjectFaults(site=site, rate=0.02, seed=3)
    changed = run(first)
    assert changed != run(InjectFaults(site=site))
    assert changed == run(InjectFaults(site=site, rate=0.02, seed=3))
    assert changed != run(InjectFaults(site=site, rate=0.02, seed=4))
    path = tmp_path / "faults.json"
    path.write_text(first.result().to_json())
    again = InjectFaults(site=site, replay=str(path))
    assert changed == run(again)
    assert again.faults == first.faults
    assert first.result().table().rows[-1][-1] == len(first.faults) > 0
    path.write_text(json.dumps({"format": "amanda.prune/1"}))
    with pytest.raises(ResultError, match="not a result of inject_faults"):
        InjectFaults(replay=str(path))


def test_a_value_at_a_place_is_that_of_a_hook() -> None:
    """PyTorchFI writes values into the outputs of modules at coordinates that are given."""
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model, tool = network(), InjectFaults(model="value", mode="per_layer", count=3, amount=50.0)
    with amanda.apply(tool):
        output = model(x)
    reference: Any = network()
    places = {op: [f.index for f in tool.faults if f.op_id == op] for op in _ids(tool)}

    def hook(indices: list[int]) -> Any:
        def write(module: nn.Module, inputs: Any, result: torch.Tensor) -> None:
            for index in indices:
                result[np.unravel_index(index, result.shape)] = 50.0

        return write

    with torch.no_grad():
        for layer, indices in zip((reference[0], reference[3]), places.values(), strict=True):
            layer.register_forward_hook(hook(indices))
        assert torch.equal(output, reference(x))


def _ids(tool: InjectFaults) -> list[int]:
    return list(dict.fromkeys(fault.op_id for fault in tool.faults))


def test_a_campaign_counts_outcomes(tmp_path: Path) -> None:
    model = network()
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def program() -> Any:
        with torch.no_grad():
            return model(x).numpy()

    tool = InjectFaults(["conv2d"], mode="per_run", bits="exponent")
    found = run_campaign(tool, program, 40)
    assert [trial.run for trial in found.trials] == list(range(1, 41))
    assert all(trial.faults == 1 for trial in found.trials)
    shares = [found.rate("masked")[0], found.rate("sdc")[0], found.rate("nan")[0]]
    assert sum(shares) == 1
    assert 0 < found.rate("sdc")[0] < 1
    lines = found.write_csv(tmp_path / "campaign.csv").read_text().splitlines()
    assert len(lines) == 41
    assert lines[0] == "run,outcome,faults,samples,changed,distance"
    assert run_campaign(InjectFaults(["conv2d"]), program, 3).rate("masked")[0] == 1
    assert program().argmax(1).shape == (4,)


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    # NIST/SEMATECH e-Handbook 7.2.4.1 has the formula; the figures are those of statsmodels.
    [(0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (10, 10, (0.7225, 1.0))],
)
def test_intervals_are_those_of_wilson(
    successes: int, trials: int, expected: tuple[float, float]
) -> None:
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-4)


def test_the_ends_of_an_interval_solve_wilsons_equation() -> None:
    for trials in (1, 7, 30, 1000):
        for successes in {0, 1, trials // 3, trials}:
            share = successes / trials
            for end in wilson_interval(successes, trials, z=1.96):
                variance = end * (1 - end) / trials
                assert (share - end) ** 2 == pytest.approx(1.96**2 * variance, abs=1e-12)


def test_a_campaign_reads_the_outputs_of_its_framework() -> None:
    model, x = network().bfloat16(), torch.randn(4, 1, 8, 8).bfloat16()
    tool = InjectFaults(["conv2d"], model="value", amount=1e4, mode="per_layer", count=50)
    found = run_campaign(tool, lambda: model(x), 3)  # Of a dtype that NumPy lacks, with gradients.
    assert [trial.outcome for trial in found.trials] == ["sdc"] * 3


def test_what_was_not_finite_without_faults_is_no_outcome() -> None:
    x = torch.tensor([[1.0, -math.inf, 0.5]])
    found = run_campaign(InjectFaults(["relu"], mode="per_run", bits=[0]), lambda: F.relu(x) + x, 5)
    assert found.rate("masked")[0] == 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: {"scores": F.relu(torch.ones(2, 3))}, "returns dict, not the scores"),
        (lambda: F.relu(torch.ones(2, 3)).sum(), "returns Tensor, not the scores"),
        (lambda: F.relu(torch.ones(0, 3)), "returns Tensor, not the scores"),
        (lambda: torch.ones(2, 3), "no operator of the types or names relu"),
        (
            lambda sizes=[2, 3, 4]: F.relu(torch.ones(sizes.pop(0), 3)),
            r"shape \(4, 3\), and unchanged \(2, 3\)",
        ),
    ],
)
def test_a_program_without_scores_or_operators_is_refused(program: Any, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        run_campaign(InjectFaults(["relu"], mode="per_run"), program, 2)
    with pytest.raises(ValueError, match="trials must not be negative"):
        run_campaign(InjectFaults(), program, -1)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), ()])
@pytest.mark.parametrize("mode", ["rate", "per_layer", "per_sample", "per_run"])
def test_nothing_is_hit_where_there_is_nothing(mode: Any, shape: tuple[int, ...]) -> None:
    tool = InjectFaults(["relu"], mode=mode, rate=1.0, count=10, model="zero")
    with amanda.apply(tool):
        for run in range(2):
            tool.begin_run(run)
            F.relu(torch.ones(shape))
    assert len(tool.faults) <= 2 * math.prod(shape)


def test_what_is_impossible_is_refused() -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("site", {"site": "bias"}),
        ("model", {"model": "flip"}),
        ("mode", {"mode": "all"}),
        ("bits", {"bits": "low"}),
        ("rate", {"rate": 2.0}),
        ("count", {"count": -1}),
    ]
    for name, options in refused:
        with pytest.raises(ValueError, match=name):
            InjectFaults(**options)
    with pytest.raises(ValueError, match="int8 has no exponent bits"):
        fields_of("int8", 1, "exponent")
    with pytest.raises(ValueError, match="from 0 to 15 for float16"):
        fields_of("float16", 2, [16])


def test_a_result_says_how_much_of_the_parameters_may_be_hit() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    tool = InjectFaults(["linear"], site="weight", mode="per_layer")
    with amanda.apply(tool), torch.no_grad():
        model(torch.tensor([1]))
    result = tool.result()
    assert (result.parameters, result.reached) == (20 + 12, 12)
    assert [vars(one) for one in result.unreached] == [
        {"name": "0.weight", "elements": 20, "reason": "not chosen"}
    ]
    assert "37.5% of the parameters reached; not reached: 0.weight (20, not chosen)" in str(
        result.table()
    )
    other = InjectFaults(["linear"], mode="per_layer")
    with amanda.apply(other), torch.no_grad():
        model[1](torch.ones(1, 4))
    assert "parameters" not in str(other.result().table())


def test_values_keep_their_layout() -> None:
    x, kernel = torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3)
    x = x.contiguous(memory_format=torch.channels_last)
    plain = torch.nn.functional.conv2d(x, kernel)
    turned = x.transpose(1, 3) @ torch.eye(3).T
    tool = InjectFaults(model="scale", amount=1.0, rate=1.0)
    with amanda.apply(tool):
        found = torch.nn.functional.conv2d(x, kernel)
        assert torch.equal(found, plain)
        assert found.stride() == plain.stride() != torch.empty(plain.shape).stride()
        assert (x.transpose(1, 3) @ torch.eye(3).T).stride() == turned.stride()
    assert tool.result().faults


def test_without_a_rate_it_is_said_that_nothing_is_injected() -> None:
    tool = InjectFaults()
    with amanda.apply(tool):
        nn.Linear(2, 2)(torch.ones(1, 2))
    said = "No rate was given, so nothing was injected: give one as `rate`"
    assert said in tool.result().table().title
    every: list[dict[str, Any]] = [{"rate": 0.0}, {"mode": "per_layer"}, {"replay": []}]
    for options in every:
        assert said not in InjectFaults(**options).result().table().title
