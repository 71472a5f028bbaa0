"""`PruneChannels`: feature boosting and suppression, the rule of Gao et al. (ICLR 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from amanda_core import OpContext
from amanda_core.activation import autodiff_enabled
from amanda_core.weak import Known
from amanda_tools.gating.gates import Gating

__all__ = ["PruneChannels"]

Pooling = Literal["mean", "l1", "l2"]
#: Key of a context: the name of its gate.
_GATE = "prune_channels.gate"


class PruneChannels(Gating):
    """Computes, for each sample, the output channels of a convolution that matter most.

    A gate predicts the saliency of each channel from the means of the input's channels,
    ``g = relu(phi(mean(x)) + rho)``. Of each sample the `density` largest are active, ``a``. Where
    the output ``y`` is read, it is replaced by ``a * (g * norm(y) + beta)``: a normalization that
    reads it keeps its ``beta``, and ``g`` is used in place of its ``gamma``. Without one, ``beta``
    is the convolution's bias. Channels whose saliency equals the threshold are not active.

    Args:
        density: The fraction of channels that is computed, from 0 to 1.
        stages: Densities to train with one after another before, such as 1.0 and 0.75.
        stage_steps: How many steps of the optimizer each of them has.
        pooling: Whether the gate reads means, means of magnitudes (`l1`) or of squares (`l2`).
        decay: The factor of `loss`.
        layers: See `Gating`; likewise `seed` and `state`.

    Raises:
        ValueError: An option is not in its range.

    >>> tool = PruneChannels(0.5)
    """

    name = "prune_channels"

    def __init__(
        self,
        density: float = 0.5,
        stages: Sequence[float] = (),
        stage_steps: int = 0,
        pooling: Pooling = "mean",
        decay: float = 1e-8,
        layers: Sequence[str] = ("*",),
        seed: int = 0,
        state: str | None = None,
    ) -> None:
        self.stages = [*stages, density]
        if not all(0 < one <= 1 for one in self.stages) or pooling not in get_args(Pooling):
            raise ValueError(f"densities are from 0 to 1: {self.stages}; pooling: {pooling!r}")
        if stages and stage_steps < 1:
            raise ValueError("stage_steps must be positive if there are stages")
        self.stage_steps, self.pooling, self.decay = stage_steps, pooling, decay
        self._made: Known[str] = Known()
        #: Gate -> the active saliencies, which are active, and the bias, in the last execution.
        self._now: dict[str, tuple[Any, Any, Any]] = {}
        super().__init__(layers, seed, state)
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_outputs, require_outputs=True)

    @property
    def density(self) -> float:
        """The fraction that is computed at present."""
        return self.stages[min(self.step // max(self.stage_steps, 1), len(self.stages) - 1)]

    def analyse(self, context: OpContext) -> None:
        """Scale what the op reads of gated convolutions, and give it a gate if it is one."""
        if not self.meets(context) or context.zone != "model":
            return
        inputs, weight = context.get_inputs(), context.weights.get(1)
        with autodiff_enabled():
            for position, key in enumerate(map(self._made.get, inputs)):
                if key is not None and context["type"] == "batch_norm":
                    context.replace_op(self.normalize, op=context.get_op(), key=key)
                elif key is not None:
                    context.insert_before_op(self.scale, inputs=[position], key=key)
            if context["type"] == "conv2d" and weight is not None and self.chosen(context):
                self.add_gate(weight.name, lambda: _gate(inputs[0], inputs[1]), inputs[0])
                context.insert_before_op(self.choose, inputs=[0, 2], key=weight.name)
                context[_GATE] = weight.name
                self.add_row(context, weight.name)

    def analyse_outputs(self, context: OpContext) -> None:
        """Note the output of a convolution, and what it costs."""
        if not self.removed and _GATE in context:
            (output,) = context.get_outputs()
            self._made.set(output, context[_GATE])
            self.rows[context[_GATE]].macs = output.numel() * context.get_inputs()[1][0].numel()

    def choose(self, x: Any, bias: Any, key: str) -> None:
        """Decide which channels of the convolution of `x` are active."""
        import torch

        pooled = {"mean": lambda: x, "l1": x.abs, "l2": x.square}[self.pooling]().mean((-2, -1))
        saliency = torch.relu(self.gates[key](pooled))
        channels = saliency.shape[-1]
        count, active = math.ceil(self.density * channels), torch.ones_like(saliency)
        if count < channels:
            limit = saliency.detach().topk(count + 1, -1).values[..., -1:]
            active = (saliency > limit).to(saliency.dtype)
        self._now[key] = saliency * active, active, bias
        self.count(key, active.sum(), active.numel())
        self.terms[key] = (saliency * active).sum()

    def scale(self, value: Any, key: str) -> Any:
        """Return the output of a convolution with its active channels boosted."""
        gain, active, bias = self._now[key]
        if bias is None:
            return value * gain[..., None, None]
        beta = bias[:, None, None]
        return (value - beta) * gain[..., None, None] + active[..., None, None] * beta

    def normalize(self, x: Any, gamma: Any, beta: Any, *rest: Any, op: Any, key: str) -> Any:
        """Return the normalized output of a convolution with its active channels boosted."""
        gain, active, _ = self._now[key]
        found = op(x, None, None, *rest) * gain[..., None, None]
        return found if beta is None else found + (active * beta)[..., None, None]

    def loss(self) -> Any:
        """Return `decay` times the sum of the active saliencies of the last execution."""
        return self.decay * sum(self.terms.values())

    def options(self) -> dict[str, Any]:
        """Return the options that a resumed tool must have as well."""
        names = ("stages", "stage_steps", "pooling", "layers")
        return {name: getattr(self, name) for name in names}


def _gate(x: Any, weight: Any) -> Any:
    import torch

    gate = torch.nn.Linear(x.shape[-3], weight.shape[0])
    torch.nn.init.trunc_normal_(gate.weight, std=0.05, a=-0.1, b=0.1)
    torch.nn.init.ones_(gate.bias)
    return gate
