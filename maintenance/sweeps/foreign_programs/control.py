"""Programs with unusual control flow: exceptions, generators, threads, gradient modes."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch and the libraries is not annotated.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from maintenance.sweeps.foreign import Note

from .catalog import program


@program(
    "exceptions in the program, generators, threads", {"linear": 3}, notice="Operators of thread"
)
def control(note: Note) -> None:
    """Catch errors, leave generators half-way, and run threads in parallel."""
    import threading

    model = nn.Linear(6, 3)

    def batches() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield model(torch.randn(2, 6))
        finally:
            note("closed", "closed")

    stream = batches()
    note("first", next(stream))
    note("second", next(stream))
    stream.close()  # type: ignore[attr-defined]
    mistakes: list[tuple[Any, Any]] = [(model, torch.randn(2, 5)), (torch.relu, "text")]
    for function, wrong in mistakes:
        try:
            function(wrong)
        except (RuntimeError, TypeError) as error:
            note(f"told {type(error).__name__}", str(error))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(model(torch.ones(2, 6))))
    thread.start()
    thread.join()
    note("of a thread", found)


@program("save_on_cpu, no_grad, inference_mode, set_grad_enabled", {"linear": 5})
def switches(note: Note) -> None:
    """Switch gradients on and off in every way."""
    model, features = nn.Linear(6, 3), torch.randn(2, 6)
    with torch.no_grad():
        note("no_grad", model(features))
    with torch.inference_mode():
        inferred = model(features)
        note("inference", inferred)
    note("is inference", inferred.is_inference())
    with torch.set_grad_enabled(False), torch.enable_grad():
        kept = model(features)
    with torch.autograd.graph.save_on_cpu():
        model(features).square().sum().backward()
    kept.sum().backward()
    model.requires_grad_(False)
    note("frozen", model(features).requires_grad)
    note("gradients", [parameter.grad for parameter in model.parameters()])
