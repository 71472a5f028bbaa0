"""Tracebacks of PyTorch programs: those of plain Python, under `amanda run` without wrappers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


def train(model):
    with torch.no_grad():
        model(torch.ones(2, 5))


train(nn.Sequential(nn.Identity(), Block()))
"""


def frames(text: str) -> list[tuple[str, str]]:
    """Return the files and functions of a traceback."""
    return re.findall(r'File "(.*)", line \d+, in (\S+)', text)


def told(folder: Path, *arguments: str, **variables: str) -> str:
    """Run the program of a folder, which fails, and return what it prints as an error."""
    ended = subprocess.run(
        [sys.executable, *arguments, "fail.py"],
        cwd=folder,
        env={"PYTHONPATH": ":".join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    return ended.stderr


@pytest.mark.parametrize("interceptor", ["native", "function_mode"])
def test_an_exception_that_leaves_apply_has_the_plain_traceback(
    interceptor: str, tmp_path: Path
) -> None:
    program = PROGRAM.replace("train(nn", "with APPLIED:\n    train(nn")
    applied = (
        "import amanda\n"
        "class Tool(amanda.Tool):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.add_inst_for_op(self.look)\n"
        "    def look(self, context):\n"
        "        context.insert_before_op(lambda x: None, inputs=[0])\n"
    )
    found = []
    for name, head, expression, variables in (
        ("plain", "import contextlib\n", "contextlib.nullcontext()", {}),
        ("tools", applied, "amanda.apply(Tool())", {}),
        ("whole", applied, "amanda.apply(Tool())", {"AMANDA_TRACEBACK": "full"}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "fail.py").write_text(head + program.replace("APPLIED", expression))
        error = told(folder, AMANDA_TORCH_INTERCEPTOR=interceptor, **variables)
        assert error.splitlines()[-1].startswith("RuntimeError: mat1 and mat2 shapes")
        found.append([(Path(file).name, where) for file, where in frames(error)])
    plain, tools, whole = found
    assert tools == plain
    assert len(whole) > len(plain)


@pytest.mark.parametrize("interceptor", ["native", "function_mode"])
def test_an_exception_of_a_routine_has_the_frames_of_the_program_and_of_the_tool(
    interceptor: str, tmp_path: Path
) -> None:
    program = PROGRAM.replace("5))", "4))")
    (tmp_path / "fail.py").write_text(
        "import amanda\n"
        "def read(x):\n"
        "    return x.of_no_tensor\n"
        "def analyse(context):\n"
        "    if context.op_type == 'linear':\n"
        "        context.insert_after_op(read, outputs=[0])\n"
        "tool = amanda.Tool()\n"
        "tool.add_inst_for_op(analyse)\n"
        + program.replace("train(nn", "with amanda.apply(tool):\n    train(nn")
    )
    folded, full = (
        told(tmp_path, AMANDA_TORCH_INTERCEPTOR=interceptor, **variables)
        for variables in ({}, {"AMANDA_TRACEBACK": "full"})
    )
    shown = [(Path(file).name, where) for file, where in frames(folded)]
    assert shown == [
        *[("fail.py", "<module>"), ("fail.py", "train"), ("fail.py", "forward")],
        *[("linear.py", "forward"), ("fail.py", "read")],
    ]
    assert "AttributeError: 'Tensor' object has no attribute 'of_no_tensor'" in folded
    assert "In insert_after_op by tool Tool(analyse), routine read" in folded
    every = [(Path(file).name, where) for file, where in frames(full)]
    assert ("module.py", "_call_impl") in every
    assert len(every) > len(shown)


@pytest.mark.one_interceptor
def test_a_traceback_is_the_plain_one_without_wrappers(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(PROGRAM)
    plain, run, full = (
        told(tmp_path, *arguments, **variables)
        for arguments, variables in (
            ([], {}),
            (["-m", "amanda", "run", "-t", "flops", "-o", "a"], {}),
            (["-m", "amanda", "run", "-t", "flops", "-o", "b"], {"AMANDA_TRACEBACK": "full"}),
        )
    )
    last = plain.splitlines()[-1]
    assert "mat1 and mat2 shapes cannot be multiplied" in last
    assert run.splitlines()[-1] == full.splitlines()[-1] == last
    assert "flops: nothing of it ran: " in run
    wrappers = ("/nn/modules/module.py", "/nn/modules/container.py", "/utils/_contextlib.py")
    assert frames(run) == [frame for frame in frames(plain) if not frame[0].endswith(wrappers)]
    assert [function for _, function in frames(run)] == [
        *("<module>", "train", "forward", "forward")
    ]
    assert set(frames(plain)) < set(frames(full))
    assert any("amanda_driver_torch" in file for file, _ in frames(full))
