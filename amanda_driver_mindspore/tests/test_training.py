"""Training under tools: steps, mixed precision, recomputation, `Model.train`, and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, mint, nn, ops
from mindspore.experimental import optim

import amanda

from .networks import numbers
from .test_gradients import everywhere, same


def network() -> nn.Cell:
    ms.set_seed(1)
    return nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 2))


X, TARGET = numbers(6, 4), numbers(6, 2)


def names(seen: list[str]) -> amanda.Tool:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(lambda *values: seen.append(context.name), observe=True)

    tool.add_inst_for_op(analyse)
    return tool


def trained(net: nn.Cell, losses: list[Any]) -> list[Any]:
    return [*losses, *(one.asnumpy() for one in net.trainable_params())]


def by_hand(make: Callable[[Any], Any]) -> list[Any]:
    net = network()
    optimizer = make(net.trainable_params())

    def loss(x: Any) -> Any:
        return ((net(x) - TARGET) ** 2).mean()

    run = ms.value_and_grad(loss, None, weights=net.trainable_params())
    losses = []
    for _ in range(3):
        value, gradients = run(X)
        optimizer(gradients)
        losses.append(value.asnumpy())
    return trained(net, losses)


def by_cell() -> list[Any]:
    net = network()
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 0.01)
    )
    return trained(net, [step(X, TARGET).asnumpy() for _ in range(3)])


class Losses(ms.train.Callback):  # type: ignore[misc]
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []

    def step_end(self, run_context: Any) -> None:
        self.losses.append(run_context.original_args().net_outputs.asnumpy())


def by_model() -> list[Any]:
    net, callback = network(), Losses()

    def rows() -> Iterator[tuple[Any, Any]]:
        for _ in range(3):
            yield X.asnumpy(), TARGET.asnumpy()

    data = ms.dataset.GeneratorDataset(rows, ["x", "target"], shuffle=False)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    model = ms.Model(net, nn.MSELoss(), optimizer)
    model.train(1, data, callbacks=[callback], dataset_sink_mode=False)
    return trained(net, callback.losses)


PROGRAMS: dict[str, Callable[[], list[Any]]] = {
    "Adam": lambda: by_hand(lambda weights: nn.Adam(weights, 0.01)),
    "experimental": lambda: by_hand(lambda weights: optim.SGD(weights, 0.1)),
    "TrainOneStepCell": by_cell,
    "Model.train": by_model,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_bit_equal_and_each_step_ends(name: str) -> None:
    program = PROGRAMS[name]
    plain = program()
    ended: list[int] = []
    steps = amanda.Tool()
    steps.add_inst_for_step(end=ended.append)
    seen: list[str] = []
    with amanda.apply(*everywhere(), names(seen), steps):
        found = program()
    assert same(found, plain)
    assert ended == [0, 1, 2]
    assert any("MatMul" in one for one in seen)


def test_cells_of_mixed_precision_have_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MindSpore writes the sources of rewritten cells.
    net = amp.auto_mixed_precision(network(), "O1", ms.float16)
    plain = net(X).asnumpy()
    seen: list[str] = []
    with amanda.apply(*everywhere(), names(seen)):
        assert same([net(X).asnumpy()], [plain])
    assert [name for name in seen if "MatMul" in name] == ["0/MatMul", "2/MatMul"]


def test_recomputed_operators_are_those_of_the_forward_program() -> None:
    net = network()

    class Outer(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = net, nn.Dense(2, 2)

        def construct(self, x: Any) -> Any:
            return self.second(self.first(x))

    def gradients(outer: nn.Cell) -> list[Any]:
        weights = outer.trainable_params()
        loss, found = ms.value_and_grad(lambda x: outer(x).sum(), None, weights=weights)(X)
        return [loss.asnumpy(), *(one.asnumpy() for one in found)]

    outer = Outer()
    expected = gradients(outer)
    outer.first.recompute()
    assert same(gradients(outer), expected)
    seen: list[tuple[str, bool]] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(
            lambda *values: seen.append((context.name, context.recomputed)), observe=True
        )

    tool.add_inst_for_op(analyse)
    with amanda.apply(*everywhere(), tool):
        assert same(gradients(outer), expected)
    inside = [name for name, again in seen if again]
    assert inside == [name for name, again in seen if not again and name.startswith("first")]
    assert "first.0/MatMul" in inside


@pytest.mark.parametrize("reentrant", [False, True])
def test_cells_that_a_function_recomputes_are_marked(reentrant: bool) -> None:
    def run() -> list[Any]:
        net = network()
        loss, found = ms.value_and_grad(
            lambda x: ms.recompute(net, x, use_reentrant=reentrant).sum(),
            None,
            weights=net.trainable_params(),
        )(X)
        return [loss.asnumpy(), *(one.asnumpy() for one in found)]

    plain, seen = run(), list[tuple[str, bool]]()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(
            lambda *values: seen.append((context.name, context.recomputed)), observe=True
        )

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(*everywhere(), tool):
        assert same(run(), plain)
    again = [name for name, is_again in seen if is_again]
    once = [name for name, is_again in seen if not is_again and name in again]
    assert again == once
    assert {"0/MatMul", "2/MatMul"} <= set(again)


def test_a_failure_is_raised_at_its_operator_with_its_name() -> None:
    x = numbers(3)
    try:
        mint.nn.functional.gelu(x).asnumpy()
        pytest.skip("MindSpore has the kernel here")
    except RuntimeError as error:
        what = str(error).splitlines()[0]
    with amanda.apply(names([])), pytest.raises(RuntimeError) as caught:
        mint.nn.functional.gelu(x)  # No value is looked at.
    assert str(caught.value).splitlines()[0] == what
    assert any("GeluExt" in note for note in caught.value.__notes__)


def test_a_failure_of_an_operator_that_no_tool_watches_is_not_blamed_on_the_next() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda c: c.insert_before_op(lambda *v: None) if c["type"] == "relu" else None
    )
    x = numbers(3)
    with amanda.apply(tool):
        for _ in range(2):  # The first time it is analysed, and waited for.
            with pytest.raises(RuntimeError) as caught:
                ops.relu(mint.nn.functional.gelu(x))
    assert any("GeluExt" in note for note in caught.value.__notes__)


def test_parameters_are_pruned_as_if_they_were_zeroed() -> None:
    net = network()
    weight: Parameter = net[0].weight
    mask = np.abs(weight.asnumpy()) > np.median(np.abs(weight.asnumpy()))

    def analyse(context: amanda.OpContext) -> None:
        if context.name == "0/MatMul":
            context.insert_before_op(lambda w: w * Tensor(mask.astype(np.float32)), inputs=[1])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        found = net(X).asnumpy()
    weight.set_data(Tensor(np.where(mask, weight.asnumpy(), 0).astype(np.float32)))
    assert same([found], [net(X).asnumpy()])
