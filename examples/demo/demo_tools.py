"""Three tools, as a user would write them.

Nothing here depends on the model: the same tools run on any other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

import amanda


@dataclass(frozen=True)
class Operator:
    """Description of one operator."""

    type: str
    name: str
    source: str
    output_shapes: str


class ListOperators(amanda.Tool):
    """Lists every operator, and counts how often each type runs."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.runs: Counter[str] = Counter()
        self.add_inst_for_op(self.collect, require_outputs=True)

    def collect(self, context: amanda.OpContext) -> None:
        """Record the operator after its first execution (an analysis routine)."""
        op_type = context.op_type
        outputs = [value for value in context.get_outputs() if isinstance(value, torch.Tensor)]
        self.operators.append(
            Operator(
                type=op_type,
                name=context.name,
                source=context.source or "",
                output_shapes=" ".join(str(tuple(output.shape)) for output in outputs),
            )
        )
        context.insert_after_op(self.count, op_type=op_type)

    def count(self, *outputs: object, op_type: str) -> None:
        """Count one execution (an instrumentation routine)."""
        self.runs[op_type] += 1


class CountConvolutions(amanda.Tool):
    """Counts the convolutions that run, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0
        self.add_inst_for_op(self.select)
        self.add_inst_for_op(self.select_backward, backward=True, require_outputs=True)

    def select(self, context: amanda.OpContext) -> None:
        """Insert a counter before forward convolutions (an analysis routine)."""
        if context.op_type == "conv2d":
            context.insert_before_op(self.count)

    def select_backward(self, context: amanda.OpContext) -> None:
        """Insert a counter after backward convolutions (an analysis routine)."""
        if "Convolution" in context.get_backward_op().__name__:
            context.insert_after_backward_op(self.count_backward)

    def count(self, *inputs: object) -> None:
        """Count one execution (an instrumentation routine)."""
        self.forward += 1

    def count_backward(self, *gradients: object) -> None:
        """Count one execution (an instrumentation routine)."""
        self.backward += 1


class PruneConvolutions(amanda.Tool):
    """Sets the smallest weights of every convolution to zero, by magnitude.

    Args:
        sparsity: Share of each weight tensor that becomes zero, from 0 to 1.
        depthwise: Prune depthwise convolutions as well.
    """

    def __init__(self, sparsity: float, depthwise: bool = True) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.depthwise = depthwise
        self.weights = 0
        self.zeros = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        """Compute the mask once for each convolution (an analysis routine)."""
        if context.op_type != "conv2d":
            return
        weight = context.get_inputs()[1]
        self.weights += weight.numel()
        if weight.shape[1] > 1 or self.depthwise:
            mask = magnitude_mask(weight, self.sparsity)
            self.zeros += int((mask == 0).sum())
            context.insert_before_op(self.prune, inputs=[1], mask=mask)

    def prune(self, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the masked weight, which the convolution uses instead (an instrumentation
        routine).
        """
        return weight * mask

    @property
    def achieved(self) -> float:
        """Return the share of zeros among the weights of all convolutions, pruned or not."""
        return self.zeros / self.weights


def magnitude_mask(weight: torch.Tensor, sparsity: float) -> torch.Tensor:
    """Return a mask that is 0 at the `sparsity` share of smallest magnitudes and 1 elsewhere."""
    mask = torch.ones_like(weight)
    count = round(sparsity * weight.numel())
    least = weight.abs().flatten().topk(count, largest=False, sorted=False).indices
    mask.view(-1)[least] = 0
    return mask
