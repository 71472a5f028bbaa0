"""Weights: the parameter that an op reads, through any views; no id refers to two of them.

Long, since it is a list of the ways in which programs hold and read weights.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import random
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils import swap_tensors as untyped_swap

import amanda
from amanda_core import OpContext
from amanda_core.errors import ResultError, ToolError, VaryingWeightWarning
from amanda_core.weights import regions
from amanda_core.weights.geometry import Memory, place_in
from amanda_core.weights.reads import Weight
from amanda_driver_torch import plugin
from amanda_tools.kit.weights.copies import Copies
from amanda_tools.kit.weights.coverage import elements_in
from amanda_tools.kit.weights.files import load_weights, save_weights
from amanda_tools.prune import Prune, PruneNM, masks
from amanda_tools.steer import Steer

swap_tensors: Any = untyped_swap
make_dual: Any = forward_ad.make_dual
unpack_dual: Any = forward_ad.unpack_dual

# Parts of parameters, by where they lie. What they show is counted element by element.


def memory_of(tensor: torch.Tensor) -> Memory:
    return Memory(0, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), 4)


Step = Callable[[torch.Tensor, int, int], torch.Tensor]
VIEWS: dict[str, Step] = {
    "index": lambda x, a, b: x.select(a % x.ndim, b % x.shape[a % x.ndim]) if x.ndim else x,
    "rest": lambda x, a, b: (
        x.narrow(a % x.ndim, b % x.shape[a % x.ndim], x.shape[a % x.ndim] - b % x.shape[a % x.ndim])
        if x.ndim
        else x
    ),
    "chunk": lambda x, a, b: x.chunk(2, a % x.ndim)[-1] if x.ndim else x,
    "step": lambda x, a, b: x[:: 1 + b % 2] if x.ndim else x,
    "swap": lambda x, a, b: x.transpose(a % x.ndim, b % x.ndim) if x.ndim else x,
    "new axis": lambda x, a, b: x.unsqueeze(a % (x.ndim + 1)),
    "expand": lambda x, a, b: x.unsqueeze(0).expand(1 + b % 3, *x.shape),
    "flat": lambda x, a, b: x.view(-1) if x.is_contiguous() else x,
}
steps = st.lists(
    st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 5), st.integers(0, 5)), max_size=5
)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), steps)
def test_a_region_holds_what_the_view_shows(
    shape: list[int], turned: bool, chain: list[tuple[str, int, int]]
) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    parameter = whole.T if turned and whole.ndim == 2 else whole
    value = parameter
    for name, a, b in chain:
        value = VIEWS[name](value, a, b)
    place = place_in(memory_of(parameter), memory_of(value))
    assert place is not None
    shown = set(value.flatten().tolist())
    held = parameter[place.region].flatten().tolist()
    assert shown <= set(held)
    if place.exact:
        assert shown == set(held)
    for axis, of in enumerate(place.axes):
        if of is not None:
            # A step along the value's axis is one along the parameter's.
            step = value.stride(axis) // parameter.stride(of)
            assert value.stride(axis) == step * parameter.stride(of)
    # An index, a slice and a transposition never leave it open which part it is.
    if not {"flat", "expand"} & {name for name, *_ in chain}:
        assert place.exact


def test_what_lies_beside_a_parameter_is_no_part_of_it() -> None:
    store = torch.arange(24.0)
    first, second = memory_of(store[:12].view(3, 4)), memory_of(store[12:].view(3, 4))
    assert place_in(first, second) is None
    assert place_in(second, first) is None
    assert place_in(first, memory_of(store[4:16])) is None
    assert place_in(first, first._replace(key=1)) is None


# What a context says.


def contexts_of(handle: amanda.Handle) -> int:
    assert handle.session is not None
    return len(list(handle.session.contexts()))


Seen = list[tuple[str, str, bool, bool]]


class Reads(amanda.Tool):
    """Notes what ops read: type, keys, whether they compute with it, whether it varies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []
        self.ids: list[tuple[int, tuple[str, ...]]] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        reads = context.weights
        for weight in reads.values():
            self.seen.append((context.op_type, weight.key, reads.consumed, weight.varies))
        context.insert_before_op(self.look, observe=True, context=context)

    def look(self, *values: Any, context: OpContext) -> None:
        if context.weights.consumed:
            keys = tuple(weight.key for weight in context.weights.values())
            self.ids.append((context.get_op_id(), keys))

    def keys(self, op_type: str) -> list[str]:
        return [key for op, key, _, _ in self.seen if op == op_type]


class Block(nn.Module):
    """Reads parameters by every kind of view."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.experts = nn.Parameter(torch.randn(4, 6, 4))
        self.out = nn.Linear(4, 5)
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.out.weight

    def forward(self, x: torch.Tensor, hit: list[int]) -> torch.Tensor:
        weight, bias = self.qkv.weight, self.qkv.bias
        q, k, v = (
            functional.linear(x, w, b)
            for w, b in zip(weight.chunk(3), torch.split(bias, 4), strict=True)
        )
        total: torch.Tensor = self.out(q) + self.tied(k) + self.out(v)
        for expert in hit:
            total = total + functional.linear(x, self.experts[expert]).sum()
        rows = self.experts[torch.tensor(hit, dtype=torch.long)]
        return total + torch.bmm(rows, x.expand(len(hit), -1, -1).mT).sum()


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.table:
            x = functional.linear(x, row)
        return x


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[0]]


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


def test_a_module_whose_own_name_has_dots_holds_its_parameters() -> None:
    model, found = nn.Module(), list[tuple[str, Any]]()
    part = nn.Linear(2, 2)
    model.forward = lambda x: part(x)
    setattr(model, "a.b", part)

    def analyse(context: OpContext) -> None:
        found.extend((weight.name, weight.parameter) for weight in context.weights.values())

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        model(torch.ones(1, 2))
    assert [name for name, _ in found] == ["a.b.weight", "a.b.bias"]
    assert [parameter for _, parameter in found] == [part.weight, part.bias]


def test_a_context_names_the_parts_of_parameters_that_an_op_reads() -> None:
    tool = Reads()
    with amanda.apply(tool):
        Block()(torch.ones(2, 4), [2, 0])
    parts = [
        key
        for n in (0, 4, 8)
        for key in (f"Block:qkv.weight[{n}:{n + 4}]", f"Block:qkv.bias[{n}:{n + 4}]")
    ]
    # What is tied is one parameter, by the name that is found first.
    linear = tool.keys("linear")
    assert linear[:6] == parts
    assert sorted(linear[6:]) == [
        "Block:experts[0]",
        "Block:experts[2]",
        "Block:out.bias",
        "Block:out.weight",
        "Block:out.weight",
    ]
    consumed = {(op, key): consumed for op, key, consumed, _ in tool.seen}
    assert not consumed["chunk", "Block:qkv.weight"]
    assert not consumed["split", "Block:qkv.bias"]
    assert consumed["linear", "Block:experts[2]"]
    # Indexed by a number it is a view, by a tensor a copy: the read ends there.
    assert [c for op, _, c, _ in tool.seen if op == "__getitem__"] == [False, False, True]
    assert tool.keys("bmm") == []
    assert not any(varies for *_, varies in tool.seen)


def test_a_weight_says_where_it_is_and_where_its_parameter_is_held() -> None:
    model = Block()
    found: list[tuple[Any, Weight]] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: found.extend(context.weights.items()))
    with amanda.apply(tool):
        model(torch.ones(2, 4), [3])
    _, weight = next((p, w) for p, w in found if w.key == "Block:experts[3]")
    assert weight.parameter is model.experts
    assert (weight.shape, weight.size, weight.axes) == ((4, 6, 4), (1, 6, 4), (1, 2))
    assert (weight.role, weight.layout) == ("weight", "OI")
    bias = next(w for p, w in found if w.key == "Block:out.bias")
    assert bias.role == "bias"
    other = nn.Parameter(torch.zeros(4, 6, 4))
    model.experts = other
    assert weight.parameter is other  # Asked, not kept.
    swap_tensors(model.experts, nn.Parameter(torch.ones(4, 6, 4)))
    del model, other
    assert weight.parameter is None


def test_no_id_stands_for_two_weights_whatever_is_hit() -> None:
    model, tool, x = Block(), Reads(), torch.ones(2, 4)
    with amanda.apply(tool) as handle:
        for hit in ([0, 1], [1, 0], [3], [2, 3, 1, 0], [0], [3, 2], []):
            model(x, hit)
        count = contexts_of(handle)
        draw = random.Random(0)
        for number in range(20):
            model(x, draw.sample(range(4), 1 + number % 4))
        assert contexts_of(handle) == count
    weights: dict[int, set[tuple[str, ...]]] = {}
    for op_id, keys in tool.ids:
        weights.setdefault(op_id, set()).add(keys)
    assert all(len(keys) == 1 for keys in weights.values())
    assert len([keys for [keys] in weights.values() if "experts[" in keys[0]]) == 4


def test_a_loop_over_more_parts_than_ids_says_that_they_vary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert regions.LIMIT == 512
    monkeypatch.setattr(regions, "LIMIT", 8)
    tool = Reads()
    with amanda.apply(tool):
        Loop()(torch.ones(1, 2))
    linear = [varies for op, _, _, varies in tool.seen if op == "linear"]
    # Beyond the limit the site's occurrences are numbered, and each says which part it reads.
    assert linear == [False] * 8 + [True] * 4
    assert [keys for _, keys in tool.ids if keys] == [(f"Loop:table[{i}]",) for i in range(12)]


def test_a_window_that_grows_makes_no_more_ops() -> None:
    model, tool = Positions(), Reads()
    with amanda.apply(tool) as handle:
        counts = []
        for length in range(1, 60):
            model(torch.ones(length, 3))
            counts.append(contexts_of(handle))
    assert counts[1:] == [counts[1]] * 58
    assert tool.ids[-1][1] == ("Positions:table[0:59]",)


@pytest.mark.parametrize("move", ["data", "to", "swap", "register"])
def test_parameters_that_move_are_found_again(move: str) -> None:
    model, tool, x = nn.Linear(3, 2), Reads(), torch.ones(1, 3)
    with amanda.apply(tool):
        model(x)
        if move == "data":
            model.weight.data = torch.zeros(2, 3)
        elif move == "to":
            model.double()
            x = x.double()
        elif move == "register":
            model.weight = nn.Parameter(torch.zeros(2, 3))
        tool.invalidate()
        model(x)
    if move == "swap":
        swap_tensors(model.weight, nn.Parameter(torch.zeros(2, 3)))
        with amanda.apply(tool):
            tool.invalidate()
            model(x)
    # A conversion reads them, too, outside of any call of a module.
    keys = [key for _, keys in tool.ids for key in keys]
    assert set(keys) == {"Linear:weight", "Linear:bias"}
    assert len(keys) == (4 if move in ("data", "register") else 6)


def test_what_lies_where_a_parameter_was_is_none() -> None:
    model, tool = Swapped(), Reads()
    old = model.weight.data
    with amanda.apply(tool):
        model(old)
        model.weight = nn.Parameter(torch.randn(2, 2))
        tool.seen.clear()
        tool.invalidate()
        model(old)  # The memory of the weight that was, as an activation.
    assert {key for _, key, _, _ in tool.seen} == {"Swapped:weight"}


def test_a_copy_beside_its_original_has_keys_of_its_own() -> None:
    model, tool, x = Block(), Reads(), torch.ones(1, 4)
    reference = copy.deepcopy(model)
    with amanda.apply(tool):
        model(x, [0])
        first, tool.seen = tool.keys("linear"), []
        reference(x, [0])
    assert tool.keys("linear") == [key.replace("Block:", "Block#2:") for key in first]


def test_outside_of_modules_a_loop_over_parts_has_an_op_for_each() -> None:
    weight, tool, x = nn.Parameter(torch.randn(3, 2, 2)), Reads(), torch.ones(1, 2)
    plain = torch.randn(2, 2, 2)
    with amanda.apply(tool):
        for _ in range(2):
            for index in (0, 2, 1):
                functional.linear(x, weight[index])
            for part in plain:
                functional.linear(x, part)
    found: dict[str, set[int]] = {}
    for op_id, keys in tool.ids:
        found.setdefault(keys[0], set()).add(op_id)
    assert {key.partition("[")[2]: len(ids) for key, ids in found.items()} == {
        "0]": 1,
        "1]": 1,
        "2]": 1,
    }
    assert len(set.union(*found.values())) == 3


PROGRAM = """
import importlib.util, sys
import torch
import amanda

rubbish = [bytearray(n) for n in range(int(sys.argv[2]))]
spec = importlib.util.spec_from_file_location("test_weights", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["test_weights"] = module
spec.loader.exec_module(module)
tool = module.Reads()
with amanda.apply(tool):
    module.Block()(torch.ones(2, 4), [1, 3])
for op_id, keys in tool.ids:
    print(op_id, *keys)
"""


@pytest.mark.slow
def test_keys_and_ids_are_the_same_in_another_process(tmp_path: Path) -> None:
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, __file__, seed + "000"],
            cwd=tmp_path,  # The root's folders are named like packages.
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        )
        found.append(done.stdout.splitlines())
    assert len(found[0]) > 8
    assert found[0] == found[1]


class MasksByOp(amanda.Tool):
    """Keeps a mask by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context["type"] == "linear":
            mask = torch.ones(2, 2)
            context.insert_before_op(lambda weight, mask: weight * mask, inputs=[1], mask=mask)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(12, 2, 2))

    def forward(self, x: torch.Tensor, hit: list[int]) -> torch.Tensor:
        for expert in hit:
            x = functional.linear(x, self.experts[expert])
        return x


def test_a_tool_that_keeps_by_operator_what_varies_is_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regions, "LIMIT", 2)
    model, x = Mixed(), torch.ones(1, 2)
    for hits, warned in (([[0, 1], [1, 0]], False), ([[0, 1, 2, 3], [0, 1, 3, 2]], True)):
        tool = MasksByOp()
        with warnings.catch_warnings(record=True) as caught, amanda.apply(tool):
            warnings.simplefilter("always")
            for hit in hits:
                model(x, hit)
        found = [w.message for w in caught if w.category is VaryingWeightWarning]
        assert len(found) == warned
        assert all("experts" in str(message) for message in found)


@pytest.mark.slow
def test_ids_are_flat_and_right_over_a_thousand_steps_of_random_routing() -> None:
    model, tool, x = Mixed(), Reads(), torch.ones(1, 2)
    draw = random.Random(0)
    with amanda.apply(tool) as handle, torch.no_grad():
        for step in range(900):
            # The last expert is not hit yet.
            model(x, draw.sample(range(11), 1 + step % 4))
            if step == 300:
                count = contexts_of(handle)
        assert contexts_of(handle) == count
        model(x, [11])
        assert contexts_of(handle) == count + 1
        for step in range(100):
            model(x, draw.sample(range(12), 1 + step % 4))
        assert contexts_of(handle) == count + 1
    weights: dict[int, set[tuple[str, ...]]] = {}
    for op_id, keys in tool.ids:
        if keys:
            weights.setdefault(op_id, set()).add(keys)
    assert all(len(keys) == 1 for keys in weights.values())
    assert {key for [keys] in weights.values() for key in keys} == {
        f"Mixed:experts[{expert}]" for expert in range(12)
    }


# Copies.


class Gathered(nn.Module):
    """Computes with copies of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 3, 2))
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(1, 2)) for _ in range(2))

    def forward(self, x: torch.Tensor, hit: list[int]) -> torch.Tensor:
        rows = self.experts[torch.tensor(hit, dtype=torch.long)]
        total = torch.stack([functional.linear(x, row) for row in rows.double().unbind()]).sum()
        one = self.experts.index_select(0, torch.tensor([1]))[0]
        return (
            total + (x @ one.double().T).sum() + (x @ torch.cat(list(self.parts)).double().T).sum()
        )


class Follows(amanda.Tool):
    """Notes from which weights the operands of products were copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies()
        self.seen: list[tuple[str, ...]] = []
        self.depends_on(self.copies)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context["type"] in ("linear", "matmul"):
            context.insert_before_op(self.look, observe=True, context=context)

    def look(self, *values: Any, context: OpContext) -> None:
        assert not context.weights
        for place, weights in self.copies.reads(context).items():
            assert place == 1
            self.seen.append(tuple(weight.key for weight in weights))


def test_a_copy_of_weights_names_them_at_the_op_that_computes_with_it() -> None:
    model, tool, x = Gathered(), Follows(), torch.ones(1, 2, dtype=torch.double)
    parts = ("Gathered:parts.0", "Gathered:parts.1")
    with amanda.apply(tool):
        # Later executions have more products than the first one, and copies of their own.
        for hit in ([2], [0, 3], [1, 2, 3]):
            tool.seen.clear()
            model(x, hit)
            assert tool.seen == [("Gathered:experts",)] * (len(hit) + 1) + [parts]
    gc.collect()
    assert len(tool.copies._sources) == 0


# What a tool keeps by weight.


class Halve(amanda.Tool):
    """Gives each linear layer half of its weight, which is kept until it is written."""

    def __init__(self, memoized: bool = False) -> None:
        super().__init__()
        self.memoized, self.calls = memoized, 0
        self.state: amanda.WeightState[str] = amanda.WeightState()
        self.made: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        self.state.watch(context)
        for place, weight in context.weights.items():
            if context["type"] == "linear" and weight.role == "weight":
                assert isinstance(place, int)
                self.state.get(weight, lambda parameter: "made")
                edit = self.state.memoized(self.edit) if self.memoized else self.edit
                context.insert_before_op(edit, inputs=[place], weight=weight)

    def edit(self, value: torch.Tensor, weight: Weight) -> torch.Tensor:
        self.calls += 1

        def half(parameter: torch.Tensor) -> torch.Tensor:
            self.made.append(weight.name)
            return parameter / 2

        new = self.state.edited(weight, half)
        assert isinstance(new, torch.Tensor)
        return new[weight.region]


def test_tied_and_split_weights_share_what_is_kept() -> None:
    tool, model = Halve(), Block()
    with amanda.apply(tool):
        model(torch.ones(2, 4), [1, 3, 1])
        model(torch.ones(2, 4), [0])
    assert sorted(tool.state) == ["Block:experts", "Block:out.weight", "Block:qkv.weight"]
    # Once for all three thirds, both layers and all experts.
    assert sorted(tool.made) == ["experts", "out.weight", "qkv.weight"]
    saved = tool.state.saved()
    assert sorted(saved) == ["experts", "out.weight", "qkv.weight"]
    again = Halve()
    again.state.load(dict.fromkeys(saved, "loaded"))
    with amanda.apply(again):
        model(torch.ones(2, 4), [2])
    assert set(again.state.saved().values()) == {"loaded"}


class Scales(amanda.Tool):
    """Keeps the largest magnitude of each weight, by part."""

    def __init__(self) -> None:
        super().__init__()
        self.state: amanda.WeightState[Any] = amanda.WeightState(by_region=True)
        self.made = 0
        self.facts: Any = None
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        self.facts = context.facts
        for weight in context.weights.values():
            if context["type"] == "linear":
                self.state.get(weight, functools.partial(self.make, weight))

    def make(self, weight: Weight, parameter: torch.Tensor) -> torch.Tensor:
        self.made += 1
        return parameter.detach()[weight.region].abs().amax(0)


SECOND = """
import sys
import torch
import amanda
from amanda_tools.kit.weights.files import load_weights, save_weights
sys.path[:0] = [sys.argv[1]]
from test_weights import Block, Scales
tool = Scales()
tool.state.load(load_weights(sys.argv[2]), lambda array, parameter: parameter.new_tensor(array))
with amanda.apply(tool):
    Block().to(torch.bfloat16)(torch.ones(2, 4, dtype=torch.bfloat16), [3, 1])
assert tool.made == 0, tool.made
save_weights(tool.state.saved(), sys.argv[3], tool.facts)
"""


@pytest.mark.slow
def test_what_is_kept_by_part_goes_through_a_file_to_another_process(tmp_path: Path) -> None:
    tool, model = Scales(), Block().to(torch.bfloat16)
    with amanda.apply(tool):
        model(torch.ones(2, 4, dtype=torch.bfloat16), [1, 3])
    saved = tool.state.saved()
    assert torch.equal(saved["experts[3]"], model.experts[3].abs().amax(0))
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    save_weights(saved, first, tool.facts)
    command = [sys.executable, "-c", SECOND, str(Path(__file__).parent), str(first), str(second)]
    subprocess.run(command, cwd=tmp_path, check=True)
    again = load_weights(second)
    assert set(again) == set(saved)
    for name, array in again.items():
        assert torch.equal(torch.from_numpy(array), saved[name].float())


def test_files_of_what_is_kept_by_weight(tmp_path: Path) -> None:
    values = {"a.weight": 0.5, "a.weight[3, :, 0:8]": [1, 2], "b": {"low": -1}}
    for name in ("ranges.json", "ranges.safetensors"):
        assert load_weights(save_weights(values, tmp_path / name)) == values
    with pytest.raises(ResultError, match="cannot hold tensors"):
        save_weights({"a": numpy.ones(2)}, tmp_path / "tensors.json")
    with pytest.raises(ResultError, match="cannot be written"):
        save_weights({"a": object()}, tmp_path / "objects.json")
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "damaged.safetensors").write_bytes(b"no")
    for name in ("other.json", "damaged.safetensors", "missing.json"):
        with pytest.raises(ResultError):
            load_weights(tmp_path / name)


def other_data_twice(layer: nn.Linear) -> None:
    # The first one's memory may be where the second one's predecessor was.
    layer.weight.data = torch.full((2, 2), 5.0)
    layer.weight.data = layer.weight.data + 1


def with_optimizer(layer: nn.Linear, **options: Any) -> None:
    layer.weight.grad = torch.ones(2, 2)
    torch.optim.AdamW(layer.parameters(), lr=0.1, **options).step()
    layer.weight.grad = None


def unseen(layer: nn.Linear) -> None:
    with amanda.disabled():
        layer.weight.data.mul_(3)


def in_inference(layer: nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight.mul_(3)


def with_its_version_preserved(layer: nn.Linear) -> None:
    # As FSDP2 does.
    with torch.autograd._unsafe_preserve_version_counter(layer.weight):  # type: ignore[attr-defined]
        layer.weight.mul_(3)


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.mul_(3),
    "a row": lambda layer: layer.weight[1].zero_(),
    "assigned": lambda layer: layer.weight.__setitem__(0, 7.0),
    "data": lambda layer: layer.weight.data.mul_(3),
    "a row of the data": lambda layer: layer.weight.data[1].fill_(2),
    "detached": lambda layer: layer.weight.detach().add_(1),
    "listed": lambda layer: torch._foreach_mul_([layer.weight.data], 3),
    "destination": lambda layer: torch.add(torch.eye(2), 3, out=layer.weight.data),
    "another parameter": lambda layer: nn.Parameter(layer.weight.data).mul_(3),
    "turned": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "other data twice": other_data_twice,
    "optimizer": with_optimizer,
    "optimizer of lists": lambda layer: with_optimizer(layer, foreach=True),
    "fused optimizer": lambda layer: with_optimizer(layer, fused=True),
    "unseen": unseen,
    "with its version preserved": with_its_version_preserved,
    "in inference": in_inference,
    "other data": lambda layer: setattr(layer.weight, "data", torch.full((2, 2), 5.0)),
    "loaded": lambda layer: layer.load_state_dict({"weight": torch.full((2, 2), 4.0)}),
    "loaded and assigned": lambda layer: layer.load_state_dict(
        {"weight": torch.full((2, 2), 6.0)}, assign=True
    ),
}


@pytest.mark.parametrize("memoized", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_an_edited_parameter_is_made_again_after_each_write(write: str, memoized: bool) -> None:
    layer, tool, x = nn.Linear(2, 2, bias=False), Halve(memoized), torch.eye(2)
    with amanda.apply(tool), torch.no_grad():
        for number in range(3):
            for _ in range(4):
                assert torch.equal(layer(x), layer.weight.T / 2)
            assert len(tool.made) == number + 1
            WRITES[write](layer)
    with torch.no_grad():
        layer.weight.data.add_(1)  # A write that is not seen.
        with amanda.apply(tool):
            assert torch.equal(layer(x), layer.weight.T / 2)


class Rows(nn.Module):
    """Reads rows of a parameter through views that are made each time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.linear(x, self.table[0]), self.table[1])


def test_a_memoized_routine_is_called_after_writes_only() -> None:
    model, x = Rows(), torch.randn(3, 2)
    for tool, native in (
        (Halve(memoized=True), plugin.amanda_driver_status().interceptor == "native"),
        (Halve(), False),
    ):
        with amanda.apply(tool), torch.no_grad():
            for _ in range(3):
                model(x)
            before = tool.calls
            expected = x @ model.table[0].T @ model.table[1].T / 4
            for _ in range(3):
                assert torch.allclose(model(x), expected)
            assert tool.calls - before == (0 if native else 6)
            model.table[1] *= 3
            assert torch.allclose(model(x), expected * 3)
            assert tool.calls - before == (2 if native else 8)
        # With gradients, it is called for each write, and once more to see that none follows.
        with amanda.apply(tool):
            for _ in range(4):
                model(x).sum().backward()
            for factor in (1, 2):
                with torch.no_grad():
                    model.table.mul_(factor)
                model.zero_grad()
                before = tool.calls
                expected = x @ model.table[0].T @ model.table[1].T / 4
                for _ in range(4):
                    output = model(x)
                    output.sum().backward()
                    assert torch.allclose(output, expected)
                assert tool.calls - before == (4 if native else 8)
                halves = model.table.detach()[0] / 2, model.table.detach()[1] / 2
                # The gradient of the edited second weight passes straight through.
                first = torch.ones(3, 2).T @ (x @ halves[0].T)
                assert model.table.grad is not None
                assert torch.allclose(model.table.grad[1], 4 * first)


@pytest.mark.filterwarnings("ignore:.* writes the model without the changes")
def test_what_is_memoized_keeps_no_tangent_and_serves_all_modes() -> None:
    model, tool, x = Rows(), Halve(memoized=True), torch.randn(3, 2)
    tangent = torch.randn(2, 2, 2)

    def program() -> Any:
        with torch.no_grad():
            plain = [model(x) for _ in range(3)]
        with torch.no_grad(), forward_ad.dual_level():
            dual = make_dual(model.table.detach(), tangent)
            outputs = [functional.linear(x, dual[0]) for _ in range(3)]
            tangents = [unpack_dual(output).tangent for output in outputs]
        with torch.inference_mode():
            plain.append(model(x))
        return plain, tangents

    with amanda.apply(tool):
        plain, tangents = program()
    assert all(torch.allclose(output, plain[0]) for output in plain)
    # Edits pass tangents straight through.
    assert all(torch.allclose(found, x @ tangent[0].T) for found in tangents)


@pytest.mark.slow
def test_an_optimizer_outdates_what_is_kept() -> None:
    for make in (torch.optim.SGD, torch.optim.AdamW):
        layer, tool, x = nn.Linear(2, 2, bias=False), Halve(), torch.eye(2)
        optimizer = make(layer.parameters(), lr=0.1)
        with amanda.apply(tool):
            for number in range(3):
                output = layer(x)
                assert torch.equal(output, layer.weight.T / 2)
                output.sum().backward()
                optimizer.step()
                assert len(tool.made) == number + 1


def test_in_inference_mode_nothing_is_kept() -> None:
    layer, tool, x = nn.Linear(2, 2, bias=False), Halve(), torch.eye(2)
    with amanda.apply(tool):
        with torch.inference_mode():
            layer(x)
            layer(x)
        assert len(tool.made) == 2
        layer(x).sum().backward()
        layer(x).sum().backward()
        assert len(tool.made) == 3


def test_a_pruned_weight_is_kept_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    made: list[torch.Tensor] = []
    multiply = masks.torch_masked

    def counted(value: torch.Tensor, mask: torch.Tensor) -> Any:
        made.append(multiply(value, mask))
        return made[-1]

    monkeypatch.setattr("amanda_tools.prune.pruning.torch_masked", counted)
    tool = Prune(0.5)
    with amanda.apply(tool):
        for number in range(3):
            for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
                for _ in range(3):
                    with mode():
                        found = layer(x)
                    mask = tool.masks.saved()["weight"]
                    with torch.no_grad():
                        assert torch.equal(found, x @ (layer.weight * mask).T)
            assert len(made) == number + 1
            with torch.inference_mode():
                layer.weight.mul_(3)
        # The mask was made in inference mode, and training works with it.
        layer(x).sum().backward()
    assert not any(new.is_inference() for new in made)
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(4, 4) * mask)  # type: ignore[arg-type]


def test_writes_outside_of_a_selection_count() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2, bias=False)), torch.ones(1, 2)
    tool = Prune(0.25).where(amanda.select(module="0"))
    with amanda.apply(tool), torch.no_grad():
        plain = model(x)
        assert tool.result().reached == 4
        next(model.parameters()).data.mul_(2)
        assert torch.equal(model(x), plain * 2)
        torch._foreach_mul_([p.data for p in model.parameters()], 2.0)
        assert torch.equal(model(x), plain * 4)


UPDATES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda one: one.data.mul_(0.5),
    "detached": lambda one: one.detach().mul_(0.5),
    "destination": lambda one: torch.mul(one.data, 0.5, out=one.data),
    "copied": lambda one: one.data.copy_(one.data * 0.5),
    "assigned": lambda one: one.data.__setitem__(0, 0.5),
    "listed": lambda one: torch._foreach_mul_([one.data], 0.5),
    "a moving average": lambda one: one.data.lerp_(torch.ones_like(one), 0.5),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("first", [0, 1, 5])
def test_each_write_of_a_loop_over_all_tensors_counts(update: str, first: int) -> None:
    # From a loop's second round on, its ops have one id, whatever they write.
    def averages() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        others, found = [torch.ones(4) for _ in range(first)], []
        with torch.no_grad():
            for _ in range(3):
                found.append(model(torch.ones(1, 4)))
                for one in (*others, *model.parameters()):
                    UPDATES[update](one)
        return [*found, *model.parameters()]

    plain = averages()
    for tool in (Prune(0.0), PruneNM(4, 4)):
        with amanda.apply(tool):
            assert all(map(torch.equal, averages(), plain))


def first_context_of(handle: amanda.Handle) -> weakref.ref[OpContext]:
    """Return a reference to a context, which lives as long as what a session stores."""
    assert handle.session is not None
    return weakref.ref(next(iter(handle.session.contexts())))


def test_watching_writes_keeps_no_session() -> None:
    tool, layer, contexts = Prune(0.5), nn.Linear(4, 4), []
    for _ in range(6):
        with amanda.apply(tool, amanda.Tool()) as handle:
            layer(torch.ones(1, 4))
            layer.weight.data.mul_(0.5)
            contexts.append(first_context_of(handle))
    gc.collect()
    assert sum(context() is not None for context in contexts) <= 1


def test_steering_weights_that_vary_keeps_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "LIMIT", 2)
    tool = Steer("scale", factor=1.0, ops=["linear"], value="inputs", operand=1)
    model, contexts = Mixed(), []
    for _ in range(4):
        with amanda.apply(tool, newest := Reads()) as handle:
            model(torch.ones(1, 2), [0, 1, 2, 3])
            contexts.append(first_context_of(handle))
        assert any(varies for *_, varies in newest.seen)
        del newest
    gc.collect()
    assert sum(context() is not None for context in contexts) <= 1


class Adjoint(torch.autograd.Function):
    """Runs a module, and recomputes it for gradients, which it asks for by parameter."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: torch.Tensor, *given: nn.Parameter) -> Any:
        ctx.run = run
        ctx.save_for_backward(x, *given)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *given = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            result = ctx.run(x)
        found = torch.autograd.grad(result, (x, *given), grads[0], allow_unused=True)
        return None, *found


@pytest.mark.parametrize("method", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_a_function_that_runs_a_module_gets_its_gradients(sparsity: float, method: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)

    def gradients(adjoint: bool) -> list[torch.Tensor]:
        run: Any = model.forward if method else model
        apply: Any = Adjoint.apply
        result = apply(run, x, *model.parameters()) if adjoint else model(x)
        return list(torch.autograd.grad(result.sum(), list(model.parameters())))

    with amanda.apply(Prune(sparsity)):
        assert all(map(torch.equal, gradients(adjoint=True), gradients(adjoint=False)))


# How much of the parameters a tool reaches.


def _draw_region(draw: random.Random, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    indices: list[int | slice] = []
    for size in shape[: draw.randint(0, len(shape))]:
        first = draw.randrange(size)
        span = slice(first, draw.randint(first + 1, size), draw.choice((None, 2)))
        indices.append(draw.choice((first, span)))
    return tuple(indices)


def test_elements_of_overlapping_regions_are_counted_once() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
        chosen = [_draw_region(draw, shape) for _ in range(draw.randint(0, 4))]
        seen = torch.zeros(shape, dtype=torch.bool)
        for region in chosen:
            seen[region] = True
        assert elements_in(chosen, shape) == int(seen.sum()), (shape, chosen)


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.w[:3]).sum() + functional.linear(x, self.w[1:3]).sum()


def test_what_overlapping_parts_do_not_reach_is_named() -> None:
    tool = Prune(0.5)
    with amanda.apply(tool):
        Overlapping()(torch.ones(1, 2))
    found = tool.result()
    assert (found.parameters, found.reached) == (8, 6)
    assert [(one.name, one.elements) for one in found.unreached] == [("w", 2)]


def test_products_of_pruned_copies_are_not_skipped() -> None:
    tool = Prune(0.5)
    with amanda.apply(tool):
        Gathered()(torch.ones(1, 2, dtype=torch.double), [1, 2])
    found = tool.result()
    assert found.skipped == []
    assert found.reached == found.parameters


class EncoderDecoder(nn.Module):
    """Calls its encoder by itself, as ``generate`` does."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(2, 2)
        self.encoder = nn.Sequential(shared)
        self.decoder = nn.Linear(2, 2, bias=False)
        self.decoder.weight = shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.encoder(x), self.decoder.weight)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self(self.encoder(x))
        return output


@pytest.mark.parametrize("whole", [False, True])
def test_a_part_that_is_called_by_itself_shares_the_weights_of_its_model(whole: bool) -> None:
    model, tool, x = EncoderDecoder(), Prune(0.5), torch.ones(1, 2)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        weight = reference.decoder.weight
        weight.mul_((weight.abs() > weight.abs().flatten().kthvalue(2).values).float())
        expected = reference.generate(x)
        with amanda.apply(tool):
            if whole:
                model(x)
            assert torch.equal(model.generate(x), expected)
    found = tool.result()
    # The name in the model, though its part may be called first.
    assert [one.name for one in found.weights] == ["encoder.0.weight"]
    assert (found.parameters, found.reached, found.unreached) == (4, 4, [])
    assert len(tool.masks) == 1


class Tied(nn.Module):
    """A table that is an embedding and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.table(ids) @ self.table.weight.T
        return output


def test_what_is_also_read_unchanged_is_not_written_into_parameters() -> None:
    model, ids = Tied(), torch.tensor([0, 3])
    weight = model.table.weight.detach().clone()
    tool = Prune(0.5)
    with torch.no_grad(), amanda.apply(tool):
        model(ids)
    with pytest.raises(ToolError, match=r"unchanged: table.weight \(24, read as an embedding\)"):
        tool.bake()
    assert torch.equal(model.table.weight, weight)
    tool = Prune(0.5, embeddings=True)
    with torch.no_grad():
        with amanda.apply(tool):
            expected = model(ids)
        assert tool.bake() == ["table.weight"]
        assert torch.equal(model(ids), expected)


def test_a_model_that_gets_the_name_of_a_dead_one_has_masks_of_its_own() -> None:
    part, tool, x = nn.Linear(2, 2, bias=False), Prune(0.5), torch.ones(1, 2)
    with torch.no_grad(), amanda.apply(tool):
        for _ in range(3):
            for each in (part, nn.Linear(2, 2, bias=False)):
                with amanda.disabled():
                    mask = each.weight.abs() > each.weight.abs().flatten().kthvalue(2).values
                    expected = functional.linear(x, each.weight * mask)
                assert torch.equal(nn.Sequential(each)(x), expected)
                assert torch.equal(each(x), expected)
                gc.collect()


def test_scripted_modules_name_their_parameters_as_not_read() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model, x = nn.Sequential(scripted, nn.Linear(2, 2)), torch.ones(1, 2)
    for root, names in ((model, ["0.0.weight"]), (scripted, ["0.weight"])):
        tool = Prune(0.5)
        with amanda.apply(tool):
            root(x)
        assert [one.name for one in tool.result().unreached] == names


class Tokens(nn.Module):
    """Prepends a token, as vision transformers do; ties its table to its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.table = nn.Embedding(3, 4)
        self.parts = nn.ParameterList(torch.randn(2, 4) for _ in range(2))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        hidden = self.table(indices)
        hidden = torch.cat([self.token.expand(len(indices), 1, 4), hidden], 1)
        hidden = functional.linear(hidden, torch.cat([*self.parts]))
        return functional.linear(hidden, self.table.weight)


def test_a_token_beside_activations_is_no_weight_and_a_tied_table_is_named() -> None:
    model, tool, indices = Tokens(), Prune(0.5), torch.tensor([[0, 2]])
    expected = copy.deepcopy(model)
    table = expected.table.weight.detach().clone()
    with torch.no_grad(), amanda.apply(tool):
        output = model(indices)
    with torch.no_grad():
        for matrix in (*expected.parts, table):
            least = matrix.abs().flatten().kthvalue(matrix.numel() // 2).values
            matrix.mul_((matrix.abs() > least).float())
        hidden = torch.cat([expected.token, expected.table(indices)], 1)
        hidden = functional.linear(hidden, torch.cat([*expected.parts]))
    assert torch.equal(output, functional.linear(hidden, table))
    found = tool.result()
    assert [(w.name, w.reason) for w in found.unreached] == [
        ("token", "read by cat, with values that are not weights")
    ]
    assert [(w.name, w.elements, w.reason) for w in found.read_otherwise] == [
        ("table.weight", 12, "read as an embedding")
    ]
    assert "also read without the mask: table.weight (12, read as an embedding)" in (
        found.table().title
    )


class Tables(nn.Module):
    """Adds a table that is tiled over its input, and one in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.tiled = nn.Parameter(torch.randn(1, 2, 4))
        self.wide = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x + self.tiled.repeat(1, 2, 1)) + self.wide.float()
        return output


def test_tables_that_are_added_are_not_multiplied_by() -> None:
    model, tool, x = Tables(), Prune(0.5), torch.randn(1, 4, 4)
    with torch.no_grad(), amanda.apply(tool):
        found = model(x)
    masks = tool.masks.saved()
    hidden = (x + model.tiled.tile(1, 2, 1)) @ (model.layer.weight * masks["layer.weight"]).T
    # What reads a cast is not known when it is made; the result says where it was none of a weight.
    assert torch.allclose(found, hidden + (model.wide * masks["wide"]).float(), atol=1e-6)
    result = tool.result()
    assert sorted(masks) == ["layer.weight", "wide"]
    assert [(w.name, w.reason) for w in result.unreached] == [
        ("tiled", "read by repeat, which is not a product")
    ]
    assert result.notes == [
        "wide is also masked where a copy is read by add, which is not a product"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_ids_are_flat_over_512_generated_tokens(name: str) -> None:
    from language_models import MODELS, generate  # Other processes load this file by itself.

    (language,) = (one for one in MODELS if one.name == name)
    model, tool = language.made(), Reads()
    if name == "mixtral":
        model.set_experts_implementation("eager")
    prompt = torch.randint(1, 59, (2, 5), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    counts = []
    with amanda.apply(tool) as handle:
        # The first tokens reach all experts, and the loops of the generation.
        for tokens in (64, 512):
            generate(model, prompt, tokens, do_sample=True)
            counts.append(contexts_of(handle))
    assert counts[1] == counts[0]
    weights: dict[int, set[tuple[str, ...]]] = {}
    for op_id, keys in tool.ids:
        weights.setdefault(op_id, set()).add(keys)
    assert all(len(keys) == 1 for keys in weights.values())
    read = {key for [keys] in weights.values() for key in keys}
    if name == "mixtral":
        assert {key.rpartition("[")[2] for key in read if ".experts." in key} == {
            f"{expert}]" for expert in range(4)
        }


def test_a_parameter_keeps_its_name_after_a_transform_of_its_model() -> None:
    model, seen = nn.Linear(4, 3, bias=False), Reads()
    values, x = dict(model.named_parameters()), torch.ones(6, 4)

    def loss(values: Any, row: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(model, values, (row,))
        return found.square().sum()

    with warnings.catch_warnings(), amanda.apply(seen):
        warnings.simplefilter("ignore", amanda.AmandaWarning)  # What runs inside is not seen.
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x)
        seen.ids.clear()
        model(x)
    assert [keys for _, keys in seen.ids] == [("Linear:weight",)]
