"""Graphs are freed at any depth after tools have looked at their nodes, and at once."""

# mypy: allow-untyped-calls

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import amanda
from amanda_driver_torch.torch_internals.extension import native

needs_extension = pytest.mark.skipif(
    native is None, reason="without it graphs are as deep as plain torch stands with hooks"
)

#: On a stack of 2 MiB, plain torch frees some 10,000 nodes that Python has seen.
STACK, DEPTH = 2 << 20, 13_000

KINDS = (
    "analysis",
    "nodes",
    "outputs",
    "inputs",
    "replacement",
    "edited inputs",
    "edited outputs",
)


def tool_of(kind: str) -> amanda.Tool:
    tool = amanda.Tool()

    def forward(context: amanda.OpContext) -> None:
        if "mul" not in context["type"]:
            return
        if kind == "outputs":
            context.insert_before_backward_op(lambda grad: None)
        elif kind == "inputs":
            context.insert_after_backward_op(lambda grad: None, grad_inputs=[0])
        elif kind == "replacement":
            context.replace_backward_op(lambda grad: grad)
        elif kind == "edited inputs":
            context.insert_before_op(lambda x: x + 0, inputs=[0])
        elif kind == "edited outputs":
            context.insert_after_op(lambda y: y + 0)

    def backward(context: amanda.OpContext) -> None:
        if kind == "nodes":
            context.insert_before_backward_op(lambda *grads: None)

    tool.add_inst_for_op(forward)
    if kind in ("analysis", "nodes"):
        tool.add_inst_for_op(backward, backward=True)
    return tool


class Held:
    """Goes with the node in whose metadata it is."""

    count = 0

    def __init__(self) -> None:
        Held.count += 1

    def __del__(self) -> None:
        Held.count -= 1


def chain(depth: int) -> torch.Tensor:
    value = torch.ones(3, requires_grad=True)
    for i in range(depth):
        value = value * 1.0001
        if i % 100 == 0:
            node: Any = value.grad_fn
            node.metadata["held"] = Held()
    return value


def free_chains(kind: str, depth: int) -> None:
    """Make and free chains that never ran backward, and one that did."""
    with amanda.apply(tool_of(kind)):
        for analysed in (False, True):
            if analysed:
                chain(10).sum().backward()  # Backward ops are planned from now on.
            value = chain(depth)
            del value
            assert Held.count == 0
        value = chain(depth)
        value.sum().backward()
        del value
        assert Held.count == 0


@contextmanager
def small_stacks() -> Iterator[None]:
    before = threading.stack_size(STACK)
    try:
        yield
    finally:
        threading.stack_size(before)


def in_thread(function: Callable[..., None], *args: Any) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function(*args)
        except BaseException as error:  # Raised again in the caller's thread.
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def main(kinds: list[str]) -> None:
    """Free deep chains under tools of these kinds; print each kind that is done."""
    with small_stacks():
        for kind in kinds:
            in_thread(free_chains, kind, DEPTH)
            print(kind, flush=True)


@needs_extension
@pytest.mark.slow
def test_chains_deeper_than_the_stack_are_freed() -> None:
    done = subprocess.run(
        [sys.executable, __file__, *KINDS], check=False, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == list(KINDS), done.stderr


@pytest.mark.slow
def test_plain_torch_overflows_the_stack_or_frees_nodes_that_python_has_seen() -> None:
    """If this returns 0 in every version of torch, the protection is no longer needed."""
    program = (
        "import torch\n"
        "y = torch.ones(3, requires_grad=True)\n"
        "for _ in range(150_000):\n"
        "    y = y * 1.0001\n"
        "    y.grad_fn\n"
        "del y\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode in (0, -11)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_long_chain_is_left_behind(kind: str) -> None:
    free_chains(kind, 300)


if __name__ == "__main__":
    main(sys.argv[1:])
