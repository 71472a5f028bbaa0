"""Check that instrumented ops account for every operator of torch that runs, as counted by torch.

A dispatch mode of torch sees each operator below autograd. In a plain run it counts all of them. In
an instrumented run it counts those that run between the routines before and after an op, forward or
backward. Both numbers must be equal.
"""

# mypy: allow-untyped-calls
# torch does not annotate Tensor.backward and similar functions.

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import amanda

#: Operators that do not belong to an op of the program, and why.
UNCOUNTED = {
    "aten::detach": "an alias that computes nothing; routines get values in it",
    "aten::alias": "an alias that computes nothing",
    "aten::lift_fresh": "an alias that computes nothing",
}
#: Operators with which the engine sums gradients between backward ops.
SUMS = ("aten::add", "aten::add_")
#: Operator that creates the first gradient of a backward pass.
FIRST = "aten::ones_like"


class Inside(amanda.Tool):
    """Knows whether an op is running, by routines before and after it.

    Attributes:
        running: Whether an op is running.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = False
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        """Insert routines before and after a forward op."""
        context.insert_before_op(self.enter)
        context.insert_after_op(self.leave)

    def backward(self, context: amanda.OpContext) -> None:
        """Insert routines before and after a backward op."""
        context.insert_before_backward_op(self.enter)
        context.insert_after_backward_op(self.leave)

    def enter(self, *values: Any) -> None:
        """Record that an op starts."""
        self.running = True

    def leave(self, *values: Any) -> None:
        """Record that an op ends."""
        self.running = False


#: What ``tolist()`` does to a tensor of a device, instead of the name of a node.
READ = "none (copy to the host)"


def _reads(name: str, args: Any, kwargs: Any) -> bool:
    to = (kwargs or {}).get("device")
    return name == "aten::_to_copy" and str(to) == "cpu" and args[0].device.type != "cpu"


class Operators(TorchDispatchMode):
    """Counts operators that return or write a tensor.

    Attributes:
        counts: Name of an operator -> number of executions; with a tool, only those inside an op.
        outside: The same outside all ops.
        engine: The same for the engine's own operators, which belong to no op of the program.
        nodes: Names of the backward nodes in which operators ran outside all ops.
    """

    def __init__(self, tool: Inside | None) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()
        self.engine: Counter[str] = Counter()
        self.nodes: set[str] = set()
        self._tool = tool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        computes = schema.is_mutable or any("Tensor" in str(r.type) for r in schema.returns)
        if computes and schema.name not in UNCOUNTED:
            counts = self.counts
            if self._tool is not None and not self._tool.running:
                # The id is not negative during a backward pass.
                sums = schema.name in SUMS and torch._C._current_graph_task_id() >= 0
                counts = self.engine if sums or schema.name == FIRST else self.outside
                if counts is self.outside:
                    node: Any = torch._C._current_autograd_node()
                    reads = READ if _reads(schema.name, args, kwargs) else "none"
                    self.nodes.add(node.name() if node is not None else reads)
            counts[schema.name] += 1
        return func(*args, **(kwargs or {}))


def unaccounted(plain: Operators, instrumented: Operators) -> tuple[list[str], int, int]:
    """Return the operators of the plain run that no instrumented op accounts for.

    Returns:
        Descriptions of these operators, the number of executions in the plain run, and the number
        of these that are the engine's own.
    """
    found = instrumented.counts + instrumented.engine
    missing = [
        f"{name} ran {number} times plain, {found[name]} inside ops"
        for name, number in plain.counts.items()
        if found[name] != number
    ]
    missing += [f"{name} ran {n} times outside" for name, n in instrumented.outside.items()]
    missing += [f"{name} never ran plain" for name in found if name not in plain.counts]
    return missing, plain.counts.total(), instrumented.engine.total()
