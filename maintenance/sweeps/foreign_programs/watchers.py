"""Programs with other observers: users' hooks, profilers, checks, modes."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch and the libraries is not annotated.

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from maintenance.sweeps.foreign import Note

from .catalog import EPOCH, EPOCH_BACKWARD, SAVES, net, program, samples, train


@program("hooks of the user's", EPOCH, EPOCH_BACKWARD, notice=SAVES)
def hooks(note: Note) -> None:
    """Use every kind of hook; each records its arguments, and some change them."""
    model, order = net(), list[str]()

    def heard(name: str, *values: Any) -> None:
        order.append(name)
        note(f"{order.count(name)} {name}", values)

    def at_node(name: str, *values: Any) -> None:
        # If the loss is a copy, this is the node of the copy.
        order.append(name)
        note.events(f"{order.count(name)} {name}", values)

    def raised(module: Any, grads: Any) -> Any:
        return (grads[0] * 1.5,)

    first, relu = model[0], model[1]
    first.register_forward_pre_hook(lambda module, args: heard("pre", args))
    first.register_forward_hook(lambda module, args, output: output * 2)
    first.register_forward_hook(
        lambda module, args, kwargs, output: heard("after", output), with_kwargs=True
    )
    relu.register_full_backward_pre_hook(raised)
    relu.register_full_backward_hook(lambda module, inputs, outputs: heard("full", inputs, outputs))
    model.register_state_dict_post_hook(lambda *values: heard("state dict"))
    model.register_state_dict_pre_hook(lambda *values: heard("before state dict"))
    model.register_load_state_dict_pre_hook(lambda *values: heard("before load"))
    model.register_load_state_dict_post_hook(lambda *values: heard("after load"))
    weight: Any = first.weight
    weight.register_hook(lambda grad: grad * 0.5)
    weight.register_post_accumulate_grad_hook(lambda p: heard("accumulated", p.grad))

    def pack(tensor: torch.Tensor) -> Any:
        order.append("pack")
        return tensor.detach().numpy().copy()

    def unpack(array: Any) -> torch.Tensor:
        order.append("unpack")
        return torch.from_numpy(array)

    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: order.append(type(module).__name__)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *values: heard("step"))
    optimizer.register_step_post_hook(lambda *values: heard("stepped"))
    try:
        for features, labels in DataLoader(samples(), 4):
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                output = model(features)
                output.register_hook(functools.partial(heard, "tensor"))
                output.retain_grad()
                loss = F.cross_entropy(output, labels)
            node: Any = loss.grad_fn
            node.register_prehook(functools.partial(at_node, "prehook"))
            node.register_hook(functools.partial(at_node, "posthook"))
            loss.backward()
            note("retained", output.grad)
            optimizer.step()
            note.training(model, loss)
    finally:
        everywhere.remove()
    model.load_state_dict(model.state_dict())
    note.events("order", order)
    note("order", [name for name in order if "hook" not in name])


@program("torch.profiler", EPOCH, EPOCH_BACKWARD)
def profiled(note: Note) -> None:
    """Record how often each operator of torch ran according to the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        train(note, net(), DataLoader(samples(), 4))
    counted = {e.key: e.count for e in seen.key_averages() if e.key.startswith("aten::")}
    # Routines receive detached values, so there are more of these.
    counted.pop("aten::detach")
    note.events("seen", sorted(counted.items()))


@program("anomaly mode, deterministic algorithms", EPOCH, EPOCH_BACKWARD)
def anomalies(note: Note) -> None:
    """Train with torch's own checks enabled."""
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly():
            train(note, net(), DataLoader(samples(), 4))
            with torch.autograd.set_detect_anomaly(True, check_nan=True):
                x = torch.zeros(2, requires_grad=True)
                try:
                    (x.sqrt() * 0).sum().backward()
                except RuntimeError as error:
                    note("told", str(error).splitlines()[0])
    finally:
        torch.use_deterministic_algorithms(False)


@program("modes of the user's", {"relu": 2, "exp": 2})
def modes(note: Note) -> None:
    """Use function and dispatch modes, nested in both orders."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3).requires_grad_()
    with Functions(), Dispatched():
        x.relu().exp().sum().backward()
    with Dispatched(), Functions():
        value = F.relu(x).exp()
    note("values", [value, x.grad])
    # Routines receive detached values, which the dispatch mode sees.
    note.events("names", [name for name in names if name != "aten.detach.default"])
