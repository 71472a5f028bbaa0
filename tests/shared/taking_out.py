"""Tools that edit, and what of them is saved and exported; one table for all frameworks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import amanda
from amanda_core.errors import AmandaError
from amanda_tools.faults import InjectFaults
from amanda_tools.kit.weights.baking_tool import BakingTool
from amanda_tools.prune import Prune, PruneNM, PruneTiles
from amanda_tools.quantize import Quantize
from amanda_tools.steer import Steer

__all__ = ["OF_ACTIVATIONS", "PORTABLE", "Row", "quantized", "refused", "running_apart"]


class Row(NamedTuple):
    """A line of the table: a tool, and why it is not saved or exported, if it is not.

    Only the weights of what says `activations` can be saved: see the rows without activations.
    """

    make: Callable[[], BakingTool]
    unsaved: str = ""
    unexported: str = ""


def quantized(method: Any = "static", activations: str = "none", **options: Any) -> Row:
    """Return the line of a tool that quantizes."""
    unsaved = "activations" if activations != "none" else ""
    return Row(lambda: Quantize(method, activations=activations, **options), unsaved)


#: A weight is input 1 of each of these. Its last axis has at least four indices.
WEIGHT: dict[str, Any] = {"ops": ["linear", "matmul", "dot_general"], "value": "inputs"}
WEIGHT["operand"] = 1
OF_ACTIVATIONS = "changes activations"
EACH = "are others in each execution"
CALLS = "acts in some steps or calls only"

PORTABLE: dict[str, Row] = {
    "prune": Row(lambda: Prune(0.5)),
    "prune global": Row(lambda: Prune(0.5, scope="global")),
    "prune in steps": Row(lambda: Prune(0.5).where(amanda.select(steps=[0])), CALLS[-19:], CALLS),
    "prune_nm": Row(PruneNM),
    "prune_tiles": Row(lambda: PruneTiles(0.5)),
    "quantize int8": quantized(),
    "quantize int4": quantized(weights="int4"),
    "quantize fp8": quantized(weights="fp8_e4m3"),
    "quantize per tensor": quantized(per="tensor"),
    "quantize zero points": quantized(symmetric=False),
    "quantize zero points int4": quantized(weights="int4", symmetric=False, per="tensor"),
    "quantize groups": quantized(weights="int4", group=4),
    "quantize groups zero points": quantized(group=2, symmetric=False, observer="mse"),
    "quantize dynamic": quantized("dynamic"),
    "quantize operands": quantized(activations="int8"),
    "quantize operands int4": quantized(weights="int4", activations="int4"),
    "quantize operands symmetric": quantized(activations="int8", symmetric=True),
    "quantize operands mse": quantized(activations="int8", observer="mse"),
    "quantize operands fp8": quantized(weights="fp8_e4m3", activations="fp8_e5m2"),
    "quantize operands dynamic": quantized("dynamic", activations="int8"),
    "quantize operands per token": quantized("dynamic", activations="int8", per_token=True),
    "quantize operands ema": quantized("dynamic", activations="int8", ema=0.9),
    "steer weight scale": Row(lambda: Steer("scale", factor=2.0, neurons=[1, 3], **WEIGHT)),
    "steer weight ablate": Row(lambda: Steer("ablate", neurons=[1, 3], **WEIGHT)),
    "steer op": Row(lambda: Steer("scale", factor=3.0, ops=["relu"]), OF_ACTIVATIONS),
    "steer op ablate": Row(lambda: Steer("ablate", neurons=[0, 1], ops=["relu"]), OF_ACTIVATIONS),
    "inject_faults": Row(lambda: InjectFaults(site="weight", rate=0.1, bits="mantissa")),
    "inject_faults noise": Row(
        lambda: InjectFaults(site="weight", mode="per_layer", model="noise", count=5)
    ),
    "inject_faults output": Row(lambda: InjectFaults(rate=0.1), OF_ACTIVATIONS, EACH),
    "inject_faults input": Row(lambda: InjectFaults(site="input", rate=0.1), OF_ACTIVATIONS, EACH),
}


def refused(call: Callable[[], Any], why: str) -> None:
    """Check that a call is refused for a reason, and that the error says what to do."""
    with pytest.raises(AmandaError, match=why) as caught:
        call()
    assert caught.value.fix


@contextmanager
def running_apart(source: str, read: Callable[[Path], Any]) -> Iterator[Callable[[Path], Any]]:
    """Yield a function that runs the program in a folder in a process without Amanda.

    Args:
        source: What the process runs. It prints ``apart`` when it has begun; it gets a folder a
            line, writes what the program in it computes, and prints ``done``.
        read: Returns what was written into a folder.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "apart\n"
    given, told = process.stdin, process.stdout

    def run(folder: Path) -> Any:
        print(folder, file=given, flush=True)
        assert told.readline() == "done\n"
        return read(folder)

    with process:
        yield run
        given.close()
