"""A sample of the sweep of programs with several ranks: nothing is wrong, and it can fail."""

from __future__ import annotations

import sys

import pytest
import torch

pytestmark = pytest.mark.one_interceptor

PROGRAMS = ["DDP", "ZeRO", "FSDP1, original parameters", "FSDP1, flat parameters", "FSDP2, bf16"]
#: Of those that only look, one: `prune` with sparsity 0 keeps results of weights.
TOOLS = ["plain", "ids", "prune", "prune, taylor", "prune, global", "quantize, mse"]


def test_eight_ranks_in_one_process() -> None:
    """A fast sample: all ranks are simulated, so that no process waits for another one."""
    from maintenance.sweeps.ranks import differences, simulate

    found = simulate("tensor parallel", ["plain", "ids", "dump", "prune, half"], seconds=120)
    assert [tool for _, tool, _ in differences(found)] == ["plain", "ids", "dump", "prune, half"]
    assert [what for _, _, what in differences(found) if what] == []
    found[0]["tensor parallel", "dump"]["losses"][0] += 1
    assert [tool for _, tool, what in differences(found) if what] == ["dump"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo is tried on Linux")
def test_two_ranks_are_instrumented_as_one_process() -> None:
    from maintenance.sweeps.ranks import differences, run

    found = run([*PROGRAMS, "tensor parallel"], TOOLS, seconds=240)
    wrong = {(program, tool): what for program, tool, what in differences(found) if what}
    assert not wrong
    masks = found[0]["DDP", "prune, taylor"]["decided"]
    name = next(iter(masks))
    masks[name] = torch.logical_not(masks[name])  # As if rank 0 had decided alone.
    assert ("DDP", "prune, taylor") in {
        (program, tool) for program, tool, what in differences(found) if what.startswith("WRONG")
    }
