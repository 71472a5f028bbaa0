"""`PruneChannels`: feature boosting and suppression, the rule of Gao et al. (ICLR 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from amanda_core import OpContext
from amanda_core.engine.activation import autodiff_enabled
from amanda_core.runtime.weak import Known
from amanda_tools.gating.gates import Gating

__all__ = ["PruneChannels"]

Pooling = Literal["mean", "l1", "l2"]


class PruneChannels(Gating):
    """Computes, for each sample, the output channels of a convolution that matter most.

    A gate predicts how salient each channel is, ``g = relu(phi(mean(x)) + rho)``. The largest of
    each sample are active, ``a``, without those equal to the first one that is left out. What reads
    the output ``y`` gets ``a * (g * y + bias)``, and a normalization, without its ``gamma``,
    computes ``a * (g * norm(y) + beta)``.

    Args:
        density: The fraction of channels that is active; an attribute, which training lowers.
        pooling: Whether gates read means, or means of magnitudes (`l1`) or squares (`l2`).
        layers: See `Gating`; likewise `seed` and `state`.

    Raises:
        ValueError: An option is not in its range.
    """

    name = "prune_channels"
    saved = ("pooling",)

    def __init__(
        self,
        density: float = 0.5,
        pooling: Pooling = "mean",
        layers: Sequence[str] = ("*",),
        seed: int = 0,
        state: str | None = None,
    ) -> None:
        if not 0 < density <= 1 or pooling not in get_args(Pooling):
            raise ValueError(f"density must be from 0 to 1: {density}; pooling: {pooling!r}")
        self.density, self.pooling = density, pooling
        self._made: Known[str] = Known()
        #: Gate -> the active saliencies, which are active, and the bias, in the last execution.
        self._now: dict[str, tuple[Any, Any, Any]] = {}
        super().__init__(layers, seed, state)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)

    def analyse(self, context: OpContext) -> None:
        """Scale what the op reads of gated convolutions, and give it a gate if it is one."""
        if not self.meets(context) or context.zone != "model":
            return
        inputs, weight = context.get_inputs(), context.weights.get(1)
        with autodiff_enabled():
            for position, key in enumerate(map(self._made.get, inputs)):
                if key and context["type"] == "batch_norm":
                    context.replace_op(self.normalize, op=context.get_op(), key=key)
                elif key:
                    context.insert_before_op(self.scale, inputs=[position], key=key)
            if context["type"] == "conv2d" and weight is not None and self.chosen(context):
                self.add_gate(weight.name, lambda: _gate(inputs[0], inputs[1]), inputs[0])
                context.insert_before_op(self.choose, inputs=[0, 2], key=weight.name)
                self.add_row(context, weight.name)

    def analyse_outputs(self, context: OpContext) -> None:
        """Note the output of a convolution, and what it costs."""
        weight, name = context.weights.get(1), ""
        if context["type"] == "conv2d" and weight is not None and weight.name in self.gates:
            name, kernel = weight.name, context.get_inputs()[1]
            self.rows[name].macs = context.get_outputs()[0].numel() * kernel[0].numel()
        for output in context.get_outputs() or ():  # What is written in place is no longer one.
            self._made.set(output, name)

    def choose(self, x: Any, bias: Any, key: str) -> None:
        """Decide which channels of the convolution of `x` are active."""
        pooled = {"mean": lambda: x, "l1": x.abs, "l2": x.square}[self.pooling]().mean((-2, -1))
        saliency = self.gates[key](pooled).relu()
        count, active = math.ceil(self.density * saliency.shape[-1]), saliency.detach() * 0 + 1
        if count < saliency.shape[-1]:
            active = (saliency > saliency.topk(count + 1, -1).values[..., -1:]).to(saliency.dtype)
        self._now[key] = saliency * active, active, 0.0 if bias is None else bias[:, None, None]
        self.count(key, active.sum(), active.numel())
        self.terms[key] = (saliency * active).sum()

    def scale(self, value: Any, key: str) -> Any:
        """Return the output of a convolution with its active channels boosted."""
        gain, active, beta = self._now[key]
        return (value - beta) * gain[..., None, None] + active[..., None, None] * beta

    def normalize(self, x: Any, gamma: Any, beta: Any, *rest: Any, op: Any, key: str) -> Any:
        """Return the normalized output of a convolution with its active channels boosted."""
        gain, active, _ = self._now[key]
        shift = 0.0 if beta is None else (active * beta)[..., None, None]
        return op(x, None, None, *rest) * gain[..., None, None] + shift

    def loss(self) -> Any:
        """Return the sum of the active saliencies of the last execution."""
        return sum(self.terms.values())


def _gate(x: Any, weight: Any) -> Any:
    import torch

    gate = torch.nn.Linear(x.shape[-3], weight.shape[0])
    torch.nn.init.trunc_normal_(gate.weight, std=0.05, a=-0.1, b=0.1)
    torch.nn.init.ones_(gate.bias)
    return gate
