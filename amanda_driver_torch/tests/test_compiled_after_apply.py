"""What a program compiles for the first time under tools, and what it compiles afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from torch import nn
import amanda

tool = amanda.Tool()
tool.add_inst_for_op(lambda context: None)
# Dynamo lists torch's functions when it compiles first.
with amanda.apply(tool):
    if "thread" in sys.argv:
        # A thread without tools, while functions are replaced.
        import threading
        thread = threading.Thread(
            target=lambda: torch.compile(torch.relu, backend="eager")(torch.ones(2))
        )
        thread.start()
        thread.join()
    else:
        torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
attend, x = nn.MultiheadAttention(8, 2), torch.ones(2, 1, 8)
call = torch.compile(lambda x: attend(x, x, x)[0], backend="eager", fullgraph=True)
expected = attend(x, x, x)[0]
assert torch.equal(call(x), expected)
torch._dynamo.reset()
with amanda.apply(tool):
    assert torch.equal(call(x), expected)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "thread"])
def test_torchs_functions_are_known_to_dynamo_after_tools(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, where], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
