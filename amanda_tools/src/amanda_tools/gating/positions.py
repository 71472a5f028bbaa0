"""`PrunePositions`: convolutions where an image needs them (Verelst and Tuytelaars, CVPR 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from amanda_core import OpContext
from amanda_core.engine.activation import autodiff_enabled
from amanda_core.runtime.weak import Known
from amanda_tools.gating.gates import Gating

__all__ = ["PrunePositions"]


class _Conv(NamedTuple):
    """A convolution: its op id, weight, multiply-accumulates of one position, kernel and stride."""

    op_id: int
    name: str
    cost: int
    kernel: int
    stride: int


class _Block(NamedTuple):
    """A residual block: its gate's name, its convolutions, and the operand that they compute."""

    name: str
    convs: tuple[_Conv, ...]
    operand: int


class PrunePositions(Gating):
    """Computes the branch of a residual block at those positions of an image that need it.

    A gate maps the block's input to one number for each position of its output,
    ``conv3x3(x) + linear(mean(x))``; positions where it is not negative are computed, and the
    others pass by the residual connection. Convolutions before a larger kernel are computed around
    them, too. While training, the decision has Gumbel noise and the gradient of its sigmoid.

    Blocks are found in the first execution, which is therefore dense: additions of two images, one
    of which passed more convolutions than the other. It ends with the step of the optimizer, the
    next call of the outermost module, or `amanda.step()`.

    Args:
        budget: The fraction of the blocks' multiply-accumulates that `loss` allows.
        steps: How many steps of the optimizer the training has. `loss` allows each block its own
            share only after a third of them, and the last fifth has no noise; 0 if not known.
        layers: Globs, one of which must match the module path of the addition; see `Gating`,
            likewise `seed` and `state`.

    Raises:
        ValueError: An option is not in its range.
    """

    name = "prune_positions"
    saved = ("budget", "steps")

    def __init__(
        self,
        budget: float = 0.5,
        steps: int = 0,
        layers: Sequence[str] = ("*",),
        seed: int = 0,
        state: str | None = None,
    ) -> None:
        if not 0 <= budget <= 1 or steps < 0:
            raise ValueError(f"budget is from 0 to 1, steps from 0: {budget}, {steps}")
        self.budget, self.steps = budget, steps
        #: Image -> the convolutions that it has passed.
        self._passed: Known[tuple[_Conv, ...]] = Known()
        #: Blocks by the op id of their first convolution, and of their addition.
        self._first, self._last = {}, {}  # type: dict[int, _Block], dict[int, _Block]
        #: Gate -> where its block is computed in this execution.
        self._hard: dict[str, Any] = {}
        self._found = False
        super().__init__(layers, seed, state)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)
        self.add_inst_for_step(end=lambda step: self._settle())
        self.add_inst_for_call(begin=lambda call: self._settle())

    def analyse(self, context: OpContext) -> None:
        """Give a block that is known a gate, and mask its branch."""
        if not self.meets(context):
            return
        inputs, op_id = context.get_inputs(), context.get_op_id()
        block = self._first.get(op_id)
        with autodiff_enabled():
            if block is not None and self._found:
                stride = math.prod(conv.stride for conv in block.convs)
                self.add_gate(block.name, lambda: _gate(inputs[0].shape[1], stride), inputs[0])
                context.insert_before_op(self.choose, inputs=[0], block=block)
            block = self._last.get(op_id)
            if block is not None and block.name in self.gates:
                context.insert_before_op(self.mask, inputs=[block.operand], block=block)

    def analyse_outputs(self, context: OpContext) -> None:
        """Follow images through the network, and note residual blocks."""
        outputs = context.get_outputs()
        if self._found or context.zone != "model" or not (self.meets(context) and outputs):
            return
        inputs, output = context.get_inputs(), outputs[0]
        passed = [self._passed.get(value) or () for value in inputs]
        path = max(passed, key=len, default=())
        image = getattr(output, "ndim", 0) == 4 and output.shape[-1] * output.shape[-2] > 1
        known = context.weights.get(1)
        if context["type"] == "conv2d" and image and known is not None:
            kernel = inputs[1]
            stride, size = round(inputs[0].shape[-1] / output.shape[-1]), max(kernel.shape[2:])
            conv = _Conv(context.get_op_id(), known.name, kernel.numel(), size, stride)
            path = (*path, conv)
            self.add_row(context, str(conv.op_id), conv.cost * (output.numel() // output.shape[1]))
        elif context["type"] == "add" and image and len(passed) > 1:
            self._note_block(context, passed[:2])
        if path and context.facts is not None and context.facts.is_tensor(output):
            self._passed.set(output, path)

    def _note_block(self, context: OpContext, passed: list[tuple[_Conv, ...]]) -> None:
        common = sum(one == other for one, other in zip(*passed, strict=False))
        operand = int(len(passed[1]) > len(passed[0]))
        branch = passed[operand][common:]
        if len(branch) <= len(passed[1 - operand]) - common or branch[0].op_id in self._first:
            return
        if self.chosen(context):
            block = _Block(branch[0].name, branch, operand)
            self._first[branch[0].op_id] = self._last[context.get_op_id()] = block

    def _settle(self) -> None:
        if self._first and not self._found:
            self._found = True
            self.invalidate()

    def choose(self, x: Any, block: _Block) -> None:
        """Decide where the branch of a block is computed, and count it."""
        import torch

        gate = self.gates[block.name]
        soft = gate["conv"](x) + gate["linear"](x.mean((2, 3)))[..., None, None]
        if self.is_training():
            if not self.steps or self.step < 0.8 * self.steps:
                noise = -torch.log(1e-8 - torch.log(1e-8 + torch.rand(2, *soft.shape).to(soft)))
                soft = soft + noise[0] - noise[1]
            soft = torch.sigmoid(soft)
            hard = ((soft >= 0.5).to(soft.dtype) - soft).detach() + soft
        else:
            hard = (soft >= 0).to(soft.dtype)
        self._hard[block.name] = positions = hard
        used, total = hard.new_zeros(()), 0
        for conv in reversed(block.convs):
            self.count(str(conv.op_id), positions.sum(), positions.numel())
            used, total = used + conv.cost * positions.sum(), total + conv.cost * positions.numel()
            positions = _around(positions.detach(), conv)
        self.terms[block.name] = used, total

    def mask(self, value: Any, block: _Block) -> Any:
        """Return the branch of a block where it is computed, and zeros elsewhere."""
        return value * self._hard[block.name]

    def loss(self) -> Any:
        """Return how far the last execution was from the budget, as a whole and by block."""
        phase = min(self.step / (0.33 * self.steps), 1.0) if self.steps else 1.0
        progress = math.cos(phase * math.pi / 2) ** 2
        highest, lowest = 1 - progress * (1 - self.budget), progress * self.budget
        shares = [used / total for used, total in self.terms.values()]
        if not shares:
            return 0.0  # The first execution.
        used, total = map(sum, zip(*self.terms.values(), strict=True))
        outside = [(p - highest).clamp(min=0) ** 2 + (lowest - p).clamp(min=0) ** 2 for p in shares]
        return (used / total - self.budget) ** 2 + sum(outside) / len(shares)


def _gate(channels: int, stride: int) -> Any:
    from torch import nn

    conv = nn.Conv2d(channels, 1, 3, stride, padding=1)
    return nn.ModuleDict({"conv": conv, "linear": nn.Linear(channels, 1)})


def _around(positions: Any, conv: _Conv) -> Any:
    """Return which positions of its input a convolution reads to compute these."""
    import torch

    if conv.stride > 1:
        spread = positions.new_zeros(
            *positions.shape[:2], *(conv.stride * n for n in positions.shape[2:])
        )
        spread[..., :: conv.stride, :: conv.stride] = positions
        positions = spread
    if conv.kernel > 1:
        positions = torch.max_pool2d(positions, conv.kernel, 1, conv.kernel // 2)
    return positions
