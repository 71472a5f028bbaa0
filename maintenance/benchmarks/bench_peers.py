"""Other ways to observe a PyTorch program, each of which does nothing with what it sees.

Peers that are separate packages are imported when they are measured. What they permanently change
in torch is undone between their turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from .bench_models import Program
from .bench_timing import Way

__all__ = ["peers"]


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def peers(program: Program) -> tuple[list[Way], dict[str, str]]:
    """Return the peers' ways to run the program, and why others are left out."""
    ways = [
        Way("module hooks", program, partial(_module_hooks, program)),
        Way("TorchFunctionMode", program, _FunctionMode),
        Way("TorchDispatchMode", program, _DispatchMode),
        Way("FlopCounterMode", program, partial(FlopCounterMode, display=False)),
    ]
    missing: dict[str, str] = {}
    makers: dict[str, Callable[[Program], Way]] = {"nnsight": _nnsight}
    if program.training:
        missing["TorchLens"] = "only its record of a forward call was measured"
    else:
        makers["TorchLens"] = _torchlens
    for name, make in makers.items():
        try:
            ways.append(make(program))
        except ImportError as error:
            missing[name] = f"not installed: {error}"
    return ways, missing


@contextmanager
def _module_hooks(program: Program) -> Iterator[None]:
    def look(module: torch.nn.Module, *values: object) -> None:
        pass

    with ExitStack() as handles:
        for module in program.model.modules():
            registered = [
                module.register_forward_pre_hook(look),
                module.register_forward_hook(look),
            ]
            if program.training:
                registered += [
                    module.register_full_backward_pre_hook(look),
                    module.register_full_backward_hook(look),
                ]
            for handle in registered:
                handles.callback(handle.remove)
        yield


def _nnsight(program: Program) -> Way:
    vanilla = torch.Tensor.backward
    import nnsight

    # Only the first import replaces it, because the module is loaded only once.
    if torch.Tensor.backward is not vanilla:
        _nnsight_backward.append(torch.Tensor.backward)
        torch.Tensor.backward = vanilla  # type: ignore[method-assign]
    # On a copy, because wrapping changes the model's modules.
    copied = Program(copy.deepcopy(program.model), program.batch, program.training)
    wrapped: Any = nnsight.NNsight(copied.model)
    batch = copied.batch

    # nnsight reads the source of a `with` block, which must be on lines of its own.
    def forward() -> None:
        with torch.no_grad(), wrapped.trace(batch):
            pass

    def train() -> None:
        with wrapped.trace(batch):
            output = wrapped.output.save()
        copied.learn(output)

    @contextmanager
    def patched() -> Iterator[None]:
        torch.Tensor.backward = _nnsight_backward[0]  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.backward = vanilla  # type: ignore[method-assign]

    if program.training:
        return Way("nnsight, output saved", train, patched)
    return Way("nnsight, empty trace", forward, patched)


_nnsight_backward: list[Any] = []


def _torchlens(program: Program) -> Way:
    import torchlens
    from torchlens.backends.torch import wrappers

    copied = copy.deepcopy(program.model)

    def run() -> None:
        with torch.no_grad():
            torchlens.trace(copied, program.batch)

    def wrapped() -> AbstractContextManager[Any]:
        # Otherwise it leaves its wrappers in torch permanently.
        extent: AbstractContextManager[Any] = wrappers.wrapped()
        return extent

    return Way("TorchLens", run, wrapped)
