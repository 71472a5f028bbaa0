"""Growth of the cost with the number of operators and tools, and the savings of the cache."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import MethodType

import torch
from torch.nn import functional

import amanda

from .bench_models import Chain, Program, Subject
from .bench_timing import Comparison, Way, interleaved
from .bench_tools import Count, EveryOp, Nothing, Prune, applied

__all__ = ["caching", "operators", "tools"]

PLAIN = "plain torch"


def operators(
    interceptors: Sequence[str], lengths: Sequence[int], seconds: float
) -> dict[int, Comparison]:
    """Time chains of this many operators, each with an identity of its own.

    Args:
        interceptors: Names of the available interceptors.
        lengths: Numbers of operators, multiples of 100.
        seconds: Time for each length.
    """
    # Exclude existing objects from garbage collection while operators are analysed.
    gc.collect()
    gc.freeze()
    results = {}
    for length in lengths:
        program = Program(Chain(length), torch.zeros(1), training=False)
        ways = [Way(PLAIN, program)]
        for name in interceptors:
            nothing, every = Nothing(), EveryOp(backward=False)
            ways += [
                Way(f"amanda {name}: nothing inserted", program, applied(name, nothing)),
                Way(f"amanda {name}: every op, empty routine", program, applied(name, every)),
            ]
        results[length] = interleaved(ways, seconds)
    gc.unfreeze()
    return results


def tools(
    subject: Subject, interceptors: Sequence[str], counts: Sequence[int], seconds: float
) -> Comparison:
    """Time a forward pass with this many tools applied at once."""
    program = subject.program(training=False)
    ways = [Way(PLAIN, program)]
    for name in interceptors:
        for count in counts:
            several = [Nothing() for _ in range(count)]
            counters = [Count(subject.counted) for _ in range(count)]
            ways += [
                Way(
                    f"amanda {name}: {count} that insert nothing", program, applied(name, *several)
                ),
                Way(f"amanda {name}: {count} that count", program, applied(name, *counters)),
            ]
    return interleaved(ways, seconds)


def caching(subject: Subject, interceptors: Sequence[str], seconds: float) -> Comparison:
    """Time tools with cached analysis and with analysis in every run (the paper's figure 12).

    Static pruning is also compared with the same model with hand-written multiplications by the
    masks.
    """
    program = subject.program(training=False)
    ways = [Way(PLAIN, program), Way("masks by hand", _masked_by_hand(program))]
    for name in interceptors:
        made: dict[str, Callable[[], amanda.Tool]] = {
            "counting": lambda: Count(subject.counted),
            "every op": lambda: EveryOp(backward=False),
            "pruning": lambda: Prune(subject.counted),
        }
        for kind, make in made.items():
            ways += [
                Way(f"amanda {name}: {kind}, cached", program, applied(name, make())),
                Way(f"amanda {name}: {kind}, uncached", program, _uncached(name, make())),
            ]
    return interleaved(ways, seconds)


def _uncached(name: str, tool: amanda.Tool) -> Callable[[], AbstractContextManager[object]]:
    def enter() -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(applied(name, tool)())
        stack.enter_context(amanda.cache_disabled())
        return stack

    return enter


def _masked_by_hand(program: Program) -> Program:
    copied = copy.deepcopy(program.model)
    for module in copied.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            module.register_buffer("mask", Prune.mask(module.weight))
            forward = _linear if isinstance(module, torch.nn.Linear) else _convolution
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return Program(copied, program.batch, program.training)


def _linear(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    mask: torch.Tensor = module.get_buffer("mask")
    return functional.linear(x, module.weight * mask, module.bias)


def _convolution(module: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    mask: torch.Tensor = module.get_buffer("mask")
    # Returns a tensor; torch's annotation of it is not precise.
    output: torch.Tensor = module._conv_forward(x, module.weight * mask, module.bias)
    return output
