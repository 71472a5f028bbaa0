"""A sentence that says what to do about the time of a step."""

from __future__ import annotations

from collections.abc import Collection

from amanda_tools.kit.operators.tool import is_eager
from amanda_tools.kit.output.rendering import format_percent

__all__ = ["advise"]

#: The share of the time between operators from which that is what to change.
_MUCH = 0.4
#: Framework -> what makes one operator of several there.
_FUSED = {"pytorch": ", `torch.compile`", "tensorflow": ", `tf.function`", "jax": ", `jax.jit`"}


def advise(
    wall: int,
    ops: int,
    rest: int,
    namespaces: Collection[str],
    longest: tuple[str, float],
    waiting: int = 0,
) -> str:
    """Return the sentence; empty if timing itself takes most of a step.

    Args:
        wall: Nanoseconds that the steps took.
        ops: The part of it in operators.
        rest: The part of it between operators.
        namespaces: Where the operators ran.
        longest: The type of operators that takes longest, and its share of all operators.
        waiting: The part of `ops` in collectives.

    >>> advise(100, 30, 62, ["pytorch/2.13.0/eager"], ("linear", 0.5))
    '62% of a step is between operators: use larger batches, `torch.compile`'
    >>> advise(100, 90, 5, ["pytorch/2.13.0/eager"], ("all_reduce", 0.9), 80).partition(":")[0]
    '80% of a step is in collectives'
    >>> advise(100, 6, 10, ["tensorflow/2.21.0/function"], ("matmul", 0.25))
    ''
    """
    if 2 * (ops + rest) < wall:
        return ""
    if rest > _MUCH * wall:
        eager = {name.partition("/")[0] for name in namespaces if is_eager(name)}
        fused = next((fix for framework, fix in _FUSED.items() if framework in eager), "")
        share = format_percent(rest, wall, 0)
        return f"{share} of a step is between operators: use larger batches{fused}"
    if 2 * waiting > ops:
        return (
            f"{format_percent(waiting, wall, 0)} of a step is in collectives: the process that "
            "spends least there is the one for which the others wait"
        )
    name, share_of_it = longest
    return (
        f"{format_percent(ops, wall, 0)} of a step is in operators, {share_of_it:.0%} of that in "
        f"{name}: make it cheaper (a smaller dtype, smaller shapes, another implementation)"
    )
