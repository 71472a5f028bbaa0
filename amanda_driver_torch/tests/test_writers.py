"""What is written, read, exported or traced of a model under tools is what it is without them."""

# mypy: allow-untyped-calls, allow-untyped-defs, disable-error-code="no-any-return, attr-defined"
# Programs here are written as users write them.

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, save as early_save  # As programs import them: before tools are applied.
from torch.export import export as early_export
from torch.jit import trace as early_trace

import amanda
from amanda_driver_torch.interception.serialization import WRITING

from .interceptors import under_both_interceptors

X = torch.ones(5, 3)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("numbers", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.relu(self.norm(self.a(x))))


def new(kind: type[Net]) -> Any:
    with amanda.disabled():
        return kind()


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


class Writing(Net):
    """Computes what is written of it, as quantized and sharded modules do."""

    def get_extra_state(self) -> torch.Tensor:
        return doubled(self.a.bias.detach())

    def set_extra_state(self, state: Any) -> None:
        pass

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}doubled"] = doubled(self.a.weight.detach()).cpu()

    def __getstate__(self) -> Any:
        return {**self.__dict__, "written": self.a.weight.detach() * 2}


class Renamed(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"model.{n}": p.detach().half().float() for n, p in self.named_parameters()}


def written(write: Callable[[Any], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def read_back(net: Net) -> Any:
    from torch.distributed import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({"net": net.state_dict()}, checkpoint_id=folder)
        with amanda.disabled():
            found = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
        checkpoint.load({"net": found}, checkpoint_id=folder)
        return found


def hooked(net: Net) -> Any:
    def change(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for name in list(state):
            state[name] = doubled(state[name])

    handle = net._register_state_dict_hook(change)
    try:
        return dict(net.state_dict())
    finally:
        handle.remove()


def loaded(net: Net) -> Any:
    with amanda.disabled():
        file = io.BytesIO(written(lambda file: torch.save(net.state_dict(), file)))
        other = Net()
    other.load_state_dict(torch.load(file, map_location="cpu"))
    return dict(other.named_parameters())


def resumed(net: Net) -> Any:
    with amanda.disabled():
        net = copy.deepcopy(net)
        optimizer = torch.optim.Adam(net.parameters())
        net(X).sum().backward()
        optimizer.step()
        other = torch.optim.Adam(net.parameters())
    other.load_state_dict(optimizer.state_dict())
    return [value for state in other.state_dict()["state"].values() for value in state.values()]


def in_safetensors(net: Net) -> Any:
    files = pytest.importorskip("safetensors.torch")
    with tempfile.TemporaryDirectory() as folder:
        files.save_model(net, f"{folder}/net")
        state = net.state_dict()
        files.save_file(state, f"{folder}/state")
        every = files.save(state), files.load_file(f"{folder}/state")
        return (*every, *(Path(folder, name).read_bytes() for name in ("net", "state")))


def exported(net: Net, strict: bool = False) -> Any:
    program = torch.export.export(net, (X,), strict=strict)
    return dict(program.run_decompositions({}).state_dict), str(program.graph)


def in_onnx(net: Net, dynamo: bool) -> bytes:
    pytest.importorskip("onnxscript" if dynamo else "onnx")
    return written(lambda file: torch.onnx.export(net, (X,), file, dynamo=dynamo, verbose=False))


#: What a program may write -> whether it warns if a tool edits.
PROGRAMS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "state_dict": (lambda net: dict(net.state_dict()), True),
    "state_dict of a kind": (lambda net: dict(new(Writing).state_dict()), True),
    "state_dict hook": (hooked, True),
    "overridden state_dict": (lambda net: new(Renamed).state_dict(), False),
    "load_state_dict": (loaded, False),
    "optimizer": (resumed, False),
    "torch.save": (lambda net: written(lambda file: torch.save(net.state_dict(), file)), True),
    "torch.save of a model": (lambda net: written(lambda file: torch.save(net, file)), True),
    "imported save": (
        lambda net: written(lambda file: early_save([*net.parameters()], file)),
        True,
    ),
    "pickle": (lambda net: pickle.dumps(net), True),
    "pickle of a kind": (lambda net: pickle.loads(pickle.dumps(new(Writing))).written, True),
    "deepcopy": (lambda net: dict(copy.deepcopy(net).named_parameters()), False),
    "deepcopy of a parameter": (lambda net: copy.deepcopy(net.a.weight), False),
    "average": (lambda net: [*torch.optim.swa_utils.AveragedModel(net).module.parameters()], False),
    "safetensors": (in_safetensors, True),
    "checkpoint": (read_back, True),
    "export": (exported, True),
    "strict export": (lambda net: exported(net, strict=True), True),
    "imported export": (lambda net: dict(early_export(net, (X,)).state_dict), True),
    "trace": (lambda net: dict(torch.jit.trace(net, X).state_dict()), True),
    "imported trace": (lambda net: dict(early_trace(net, X).state_dict()), True),
    "script": (lambda net: dict(torch.jit.script(net).state_dict()), True),
    "symbolic_trace": (lambda net: torch.fx.symbolic_trace(net).code, False),
    "onnx": (lambda net: in_onnx(net, dynamo=True), True),
    "onnx by TorchScript": (lambda net: in_onnx(net, dynamo=False), True),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class AddsOne(amanda.Tool):
    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        def add(*values: Any) -> Any:
            floats = [isinstance(v, torch.Tensor) and v.is_floating_point() for v in values]
            return [v + 1.0 if float_ else v for v, float_ in zip(values, floats, strict=True)]

        context.insert_after_op(add)


class Counts(amanda.Tool):
    """Promises nothing, and only counts."""

    def __init__(self) -> None:
        self.count = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.add)
        context.insert_after_op(lambda *values: self.add())

    def add(self, *values: Any) -> None:
        self.count += 1


def run(program: Callable[[Any], Any], net: Net, *tools: amanda.Tool) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with amanda.apply(*tools):
            torch.manual_seed(1)
            found = program(net)
    return found, [str(w.message) for w in caught if issubclass(w.category, amanda.AmandaWarning)]


@under_both_interceptors
@pytest.mark.parametrize(
    "name",
    # Those that export to ONNX need a package that the fast tests do without.
    [pytest.param(name, marks=[pytest.mark.slow] * ("onnx" in name)) for name in PROGRAMS],
)
def test_what_is_written_is_that_without_tools(
    name: str, interceptor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", interceptor)
    program, warns = PROGRAMS[name]
    net = Net().eval()
    expected, _ = run(program, net)
    counts = Counts()
    found, said = run(program, net, counts)
    assert same(found, expected)
    assert not said
    found, said = run(program, net, AddsOne())
    assert same(found, expected)
    assert len(said) == warns, said
    assert all("without the changes of AddsOne" in one for one in said)


def test_observers_that_have_run_give_no_warning() -> None:
    def program(net: Net) -> Any:
        net(X)
        return net.state_dict()

    class Reads(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            context.insert_before_op(lambda *values: print(*map(type, values), end=""))

    assert run(program, Net(), Reads())[1] == []
    assert len(run(program, Net(), AddsOne())[1]) == 1


def test_one_warning_for_all_that_is_written_and_none_while_disabled() -> None:
    def program(net: Net) -> None:
        with amanda.disabled():
            net.state_dict()
        for _ in range(2):
            written(lambda file: torch.save(net.state_dict(), file))
            torch.export.export(net, (X,))

    _, said = run(program, Net().eval(), AddsOne())
    assert len(said) == 1
    assert said[0].startswith("state_dict writes")


def test_tools_work_again_after_a_writer_failed() -> None:
    class Refused(Exception):
        pass

    class File(io.BytesIO):
        def write(self, data: Any) -> int:
            raise Refused

    counts, net = Counts(), Net().eval()
    with amanda.apply(counts):
        with pytest.raises(Refused):
            torch.save(net.state_dict(), File(), _use_new_zipfile_serialization=False)
        assert counts.count == 0
        net(X)
    assert counts.count == 8


def test_the_functions_that_write_are_found() -> None:
    """A release that renames them all would leave early references unseen."""
    for module in ("torch.serialization", "torch.nn.modules.module", "torch.nn.parameter"):
        assert list(WRITING.of(module))
