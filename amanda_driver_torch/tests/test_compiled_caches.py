"""Caches of torch's compiler after graphs with tools: other processes get plain programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .interceptors import STAYS_COMPILED

pytestmark = [pytest.mark.slow, STAYS_COMPILED]

PROGRAM = """
import sys
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

X = torch.linspace(-1, 1, 40).reshape(5, 8)
MASK = (torch.arange(32) % 2).reshape(4, 8).float()

def step():
    weight = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    output = torch.compile(lambda x, w: F.linear(x, w).relu(), fullgraph=True)(X, weight)
    output.sum().backward()
    return output.detach(), weight.grad

def hits():
    found = counters["inductor"], counters["aot_autograd"]
    return found[0]["fxgraph_cache_hit"] + found[1]["autograd_cache_hit"]

weight = torch.linspace(-1, 1, 32).reshape(4, 8)
expected = F.linear(X, weight).relu()
"""

PRUNING = """
import amanda

@amanda.staged
def prune(weight):
    return weight * MASK

def analyse(context):
    if context.op_type == "linear":
        context.insert_before_op(prune, inputs=[1])
    if context.op_type == "relu":
        context.insert_after_op(lambda output: output + 1)

tool = amanda.Tool()
tool.add_inst_for_op(analyse)
with amanda.apply(tool) as handle:
    output, gradient = step()
    gaps = [gap.what for gap in handle.coverage()["pytorch"]]
torch.testing.assert_close(output, F.linear(X, weight * MASK).relu() + 1)
assert not any("compiled callable" in what for what in gaps), gaps
"""

PLAIN = """
found = step()
assert hits() == 0, counters
torch.testing.assert_close(found[0], expected)
torch._dynamo.reset()
again = step()
assert hits() > 0, "nothing is cached here"
torch._dynamo.reset()
import torch._inductor.config
with torch._inductor.config.patch(force_disable_caches=True):
    uncached = step()
for other in again, uncached:
    assert all(map(torch.equal, found, other))
"""


def run(program: str, caches: Path) -> None:
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "AMANDA_TORCH_INTERCEPTOR": "native",
    }
    subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM + program], check=True, env=os.environ | settings
    )


def test_another_process_gets_nothing_of_a_tool(tmp_path: Path) -> None:
    run(PRUNING, tmp_path)
    assert not [path for name in ("fxgraph", "aotautograd") for path in tmp_path.glob(f"{name}/*")]
    run(PLAIN, tmp_path)
