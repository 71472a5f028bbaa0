"""Layers that are compiled one by one: tools whose plans are alike share their code."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import amanda
from amanda_driver_torch.torch_internals.dynamo import set_recompile_region

from .interceptors import STAYS_COMPILED
from .tensors import grad_of

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    # Dynamo asks inputs that are no leaves for it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    STAYS_COMPILED,
]

SHARES = pytest.mark.skipif(
    set_recompile_region is None,
    reason="in this release of torch layers count for one limit of recompilations, and share none",
)
AOT: Any = lookup_backend("aot_eager")
LAYERS = 4
#: Record of a value: name of the operator, point, position, and its sum.
Seen = tuple[str, str, int, float]


class Layer(nn.Module):
    """A layer whose only argument is not called ``self``."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(this, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = this.second(torch.tanh(this.first(x)))
        return x + added


class Model(nn.Module):
    def __init__(self, widths: Sequence[int] = (8,) * LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = layer(x[..., : layer.first.in_features])
        return x


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    """Return a list for the graphs that are compiled."""
    return []


def made(graphs: list[torch.fx.GraphModule] | None, *widths: int) -> Model:
    """Return a model; with `graphs` its layers are compiled, and note their graphs there."""
    torch.manual_seed(0)
    model = Model(widths) if widths else Model()

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        assert graphs is not None
        graphs.append(gm)
        compiled: Callable[..., Any] = AOT(gm, inputs)
        return compiled

    for layer in model.layers if graphs is not None else ():
        layer.compile(backend=backend)
    return model


def trained(model: Model, steps: int = 3) -> list[float]:
    """Train a model, and return its losses and the sums of its gradients."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(steps):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step), requires_grad=True)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found += [loss.item(), *(float(grad_of(p).sum()) for p in model.parameters())]
    return found


class Looks(amanda.Tool):
    """Notes the sums of all values and gradients of operators whose names `wanted` chooses."""

    def __init__(self, wanted: Callable[[str], bool] = lambda name: "layers" in name) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self.wanted = wanted
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        if self.wanted(context.name):
            name = context.name
            context.insert_before_op(self.note, observe=True, name=name, point="inputs")
            context.insert_after_op(self.note, observe=True, name=name, point="outputs")

    def backward(self, context: amanda.OpContext) -> None:
        if self.wanted(context.name):
            context.insert_before_backward_op(
                self.note, observe=True, name=context.name, point="gradients"
            )

    def note(self, *values: Any, name: str, point: str) -> None:
        for position, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                self.seen.append((name, point, position, round(float(value.sum()), 3)))


class Scales(amanda.Tool):
    """Scales outputs of ``tanh`` and their gradients on the host, in each layer otherwise."""

    def __init__(self, staged: bool = False) -> None:
        super().__init__()
        self.staged, self.number = staged, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == "tanh":
            self.number += 1
            factor = 1 + 0.25 * self.number
            routine = amanda.staged(scaled) if self.staged else scaled
            context.insert_after_op(routine, factor=factor)
            context.insert_before_backward_op(routine, factor=factor)


def scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    return value * factor


class Masks(amanda.Tool):
    """Masks the weights of ``linear`` and the gradients of its outputs, in each layer otherwise.

    Attributes:
        masks: Name of an operator -> the masks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            shape, seed = context.get_inputs()[1].shape, torch.Generator()
            seed.manual_seed(int.from_bytes(context.name.encode()[:16], "big") % 1_000_003)
            mask, last = torch.rand(shape, generator=seed), torch.rand(shape[0], generator=seed)
            self.masks[context.name] = mask, last
            context.insert_before_op(masked, inputs=[1], mask=mask)
            context.insert_before_backward_op(masked, mask=last)


@amanda.staged
def masked(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask > 0.5, value, 0.0) * mask


def test_plain_layers_share_one_graph(graphs: list[Any]) -> None:
    with torch.no_grad():
        made(graphs)(torch.ones(2, 8))
    assert len(graphs) == 1


@SHARES
@pytest.mark.parametrize("make", [amanda.Tool, Looks, Scales, Masks])
def test_tools_share_the_graphs_of_plain_layers(
    graphs: list[Any], make: Callable[[], amanda.Tool]
) -> None:
    trained(made(graphs))
    plain = len(graphs)
    torch._dynamo.reset()
    graphs.clear()
    model = made(graphs)
    tool = make()
    with amanda.apply(tool):
        trained(model)
    assert len(graphs) == plain
    with amanda.apply(tool):  # Nothing is compiled again.
        trained(model)
    assert len(graphs) == plain


def test_values_and_gradients_are_those_of_each_layer(graphs: list[Any]) -> None:
    eager, compiled = Looks(), Looks()
    with amanda.apply(eager):
        expected = trained(made(None))
    with amanda.apply(compiled):
        found = trained(made(graphs))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len({name for name, *_ in eager.seen}) > 3 * LAYERS
    assert sorted(compiled.seen) == sorted(eager.seen)


@SHARES
def test_edits_are_those_of_each_layer(graphs: list[Any]) -> None:
    with amanda.apply(Scales()):
        expected = trained(made(None))
    with amanda.apply(Scales()):
        found = trained(made(graphs))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found != pytest.approx(trained(made(None)), rel=1e-3)
    assert len(graphs) <= 2


@SHARES
def test_tensors_of_staged_edits_are_those_of_each_layer(graphs: list[Any]) -> None:
    eager, compiled = Masks(), Masks()
    for model, tool in ((made(None), eager), (made(graphs), compiled)):
        with amanda.apply(tool):
            found = [trained(model)]
            for mask, last in tool.masks.values():  # They may change, and nothing is compiled.
                mask.mul_(0.9)
                last.add_(0.1)
            found.append(trained(model))
        tool.found = found  # type: ignore[attr-defined]
    assert eager.masks.keys() == compiled.masks.keys()
    assert len(eager.masks) == 2 * LAYERS
    for a, b in zip(eager.found, compiled.found, strict=True):  # type: ignore[attr-defined]
        assert b == pytest.approx(a, rel=1e-5, abs=1e-6)
    assert eager.found[0] != pytest.approx(eager.found[1])  # type: ignore[attr-defined]
    assert len(graphs) <= 2


def test_staged_edits_that_differ_are_compiled_apart(graphs: list[Any]) -> None:
    with amanda.apply(Scales(staged=True)):
        expected = trained(made(None))
    with amanda.apply(Scales(staged=True)):
        found = trained(made(graphs))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@SHARES
def test_a_layer_with_another_plan_is_compiled_apart(graphs: list[Any]) -> None:
    def is_wanted(name: str) -> bool:
        return "layers.2" in name

    eager, compiled = Looks(is_wanted), Looks(is_wanted)
    with amanda.apply(eager):
        trained(made(None))
    with amanda.apply(compiled):
        trained(made(graphs))
    assert eager.seen
    assert sorted(compiled.seen) == sorted(eager.seen)
    assert len(graphs) == 2


def test_many_plans_do_not_reach_the_limit_of_compilations(graphs: list[Any]) -> None:
    widths = (8,) * 12
    with amanda.apply(eager := Scales(staged=True)):
        expected = trained(made(None, *widths), 1)
    with amanda.apply(compiled := Scales(staged=True)):
        found = trained(made(graphs, *widths), 1)
    assert (eager.number, compiled.number) == (12, 12)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len(graphs) == 12


def test_layers_of_other_shapes_and_replaced_weights(graphs: list[Any]) -> None:
    eager, compiled = Looks(), Looks()
    for tool, model in ((eager, made(None, 8, 8, 6, 6)), (compiled, made(graphs, 8, 8, 6, 6))):
        with amanda.apply(tool):
            trained(model, 1)
            layer: Any = model.layers[1]
            layer.first.weight = nn.Parameter(torch.full_like(layer.first.weight, 0.5))
            trained(model, 1)
            model.layers[1] = model.layers[0]
            trained(model, 1)
    assert sorted(compiled.seen) == sorted(eager.seen)


def test_layers_die_although_others_share_their_code(graphs: list[Any]) -> None:
    tool, model = amanda.Tool(), made(graphs)
    with amanda.apply(tool):
        trained(model, 1)
        dead = [weakref.ref(layer) for layer in (model.layers[0], model.layers[3])]
        del model.layers[3], model.layers[0]
        gc.collect()
        assert [one() for one in dead] == [None, None]
        trained(model, 1)
