"""A sentence that says what to do about the time of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amanda_tools.kit.operators.tool import is_eager
from amanda_tools.kit.output.rendering import format_percent

if TYPE_CHECKING:
    from amanda_tools.latency.result import LatencyResult

__all__ = ["advice"]

#: The share of the time between operators from which that is what to change.
_MUCH = 0.4
#: Framework -> what makes one operator of several there.
_FUSED = {"pytorch": ", `torch.compile`", "tensorflow": ", `tf.function`", "jax": ", `jax.jit`"}


def advice(result: LatencyResult) -> str:
    """Return the sentence; empty if other tools work between the operators, or nothing ran."""
    rest, ops = (sum(getattr(step, name) for step in result.counted) for name in ("rest", "ops"))
    if result.others or rest < 0 or not ops:
        return ""
    if rest > _MUCH * result.wall:
        eager = {op.namespace.partition("/")[0] for op in result.ops if is_eager(op.namespace)}
        fused = next((fix for framework, fix in _FUSED.items() if framework in eager), "")
        share = format_percent(rest, result.wall, 0)
        return f"{share} of a step is between operators: use larger batches{fused}"
    name, found = next(iter(result.by_type().items()))
    return (
        f"{format_percent(ops, result.wall, 0)} of a step is in operators, "
        f"{format_percent(found.typical, result.total.typical, 0)} of that in {name}: "
        "make it cheaper (a smaller dtype, smaller shapes, another implementation)"
    )
