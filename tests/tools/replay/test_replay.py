"""Operators of a recorded run that are executed again: equal, or by how much they differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

import amanda
from amanda_core.errors import ResultError
from amanda_tools.commands import replay as command
from amanda_tools.dump import Dump
from amanda_tools.dump.arguments import UnknownArgumentError, decoded, encoded
from amanda_tools.dump.index import INDEX
from amanda_tools.kit.tensors.values import UNKNOWN
from amanda_tools.replay import replay

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.nn.Parameter(torch.randn(64, 2, generator=torch.Generator().manual_seed(1)))
STRIDED = torch.randn(2, 6, 18, generator=torch.Generator().manual_seed(2)).mT[:, 8:10]


def recorded(folder: Path, program: Callable[[], object]) -> Path:
    tool = Dump(calls=True, everything=True, folder=folder)
    with torch.no_grad(), amanda.apply(tool):
        program()
    tool.result()
    return folder


CALLS: dict[str, Callable[[], object]] = {
    "conv1d": lambda: F.conv1d(X, X[:, :, :3].reshape(2, 4, 3), None, padding=1),
    "layer_norm": lambda: F.layer_norm(X, (8,), eps=1e-3),
    "__getitem__": lambda: X[0, 1:, None],
    "mT": lambda: X.mT,
    "cat": lambda: torch.cat([X, X], 1),
    "to": lambda: X.to(torch.float16),
    "half": lambda: X.half(),
    "view": lambda: X.view(8, 8),
    "add": lambda: X + 1,
    "sub": lambda: torch.sub(X, X, alpha=2),
    "add_": lambda: X.clone().add_(1),
    "einsum": lambda: torch.einsum("abc,abc->a", X, X),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(X, X, X, is_causal=True),
    "sum": lambda: X.sum(dim=1, keepdim=True),
    "max": lambda: X.max(1),
    "split": lambda: torch.split(X, 2, 1),
    "zeros": lambda: torch.zeros(3, dtype=torch.int8, device="cpu"),
    "upsample_nearest1d": lambda: F.interpolate(X, scale_factor=2.0),
    "embedding": lambda: F.embedding(torch.tensor([1]), X[0]),
    "cross_entropy_loss": lambda: F.cross_entropy(X[0], torch.arange(4)),
    "where": lambda: torch.where(X > 0, X, 0.0),
    "masked_fill": lambda: X.masked_fill(X > 0, -float("inf")),
    "linear": lambda: F.linear(X.bfloat16(), X[0].bfloat16()),
    "silu": lambda: F.silu(X.transpose(1, 2)),
    "exp": lambda: torch.exp(X[:1, :, :1].expand(2, 4, 8)),
    "sin": lambda: torch.sin(X.reshape(-1).unfold(0, 8, 1)),
    # Two kernels, of which PyTorch chooses by strides and by whether gradients are needed.
    "matmul": lambda: torch.matmul(WEIGHT, STRIDED),
    "complex64": lambda: torch.mul(X.to(torch.complex64), 1j),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_returns_the_same_again(name: str, tmp_path: Path) -> None:
    folder = recorded(tmp_path / "dump", CALLS[name])
    found = replay(folder, "mul" if name == "complex64" else name)
    assert found.outputs
    assert found.same, found.conclusion()
    assert found.notes == []


@pytest.mark.slow
def test_all_operators_of_a_published_architecture(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 8}
    model = transformers.MambaModel(transformers.MambaConfig(**sizes)).eval()
    folder = recorded(tmp_path / "dump", lambda: model(input_ids=torch.arange(12).reshape(2, 6)))
    ops = json.loads((folder / INDEX).read_text())["ops"]
    assert len(ops) > 200
    for op in ops:
        found = replay(folder, op["name"])
        assert found.same, (op["name"], found.conclusion())


def test_another_dtype_differs_by_what_the_framework_says(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "dump", lambda: torch.softmax(X, -1))
    found = replay(folder, "softmax", dtype="bfloat16")
    expected = torch.softmax(X.bfloat16(), -1).float() - torch.softmax(X, -1)
    (one,) = found.outputs
    assert one.difference is not None
    assert one.difference.max_abs == pytest.approx(float(expected.abs().max()), rel=1e-6)
    assert one.dtypes == ["float32", "bfloat16"]
    assert not found.same


def test_executions_and_steps_are_told_apart(tmp_path: Path) -> None:
    def program() -> None:
        for step in range(3):
            for scale in (1.0, 2.0):
                torch.mul(X, step + scale)
            amanda.step()

    folder = recorded(tmp_path / "dump", program)
    for step, execution in ((0, 0), (0, 1), (2, 4), (2, 5)):
        assert replay(folder, "mul", step, execution).same
    assert replay(folder, "mul", 2).execution == 4
    with pytest.raises(ValueError, match="in step 5; it is recorded in steps 0, 1, 2"):
        replay(folder, "mul", 5)


def test_a_record_that_was_changed_differs(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "dump", lambda: F.leaky_relu(X, 0.5))
    index = folder / INDEX
    content = json.loads(index.read_text())
    assert content["arguments"][0]["values"]["negative_slope"] == 0.5
    content["arguments"][0]["values"]["negative_slope"] = 0.25
    index.write_text(json.dumps(content))
    (one,) = replay(folder, "leaky_relu").outputs
    assert one.difference is not None
    assert one.difference.max_abs == pytest.approx(float(-X.min() * 0.25))


@pytest.mark.parametrize(
    ("program", "name", "why"),
    [
        (lambda: F.dropout(X), "dropout", "it draws random numbers"),
        (lambda: torch.empty(2).uniform_(generator=torch.Generator()), "uniform_", "generator"),
        (lambda: X.clone().map_(X, lambda a, b: a), "map_", "is unknown: function"),
        (lambda: torch.empty_like(X), "empty_like", "no values yet"),
        (lambda: torch.sparse.mm(torch.eye(2).to_sparse(), torch.ones(2, 2)), "mm", "not in"),
    ],
    ids=["dropout", "generator", "callback", "empty", "sparse"],
)
def test_what_cannot_be_represented_is_refused_by_name(
    program: Callable[[], object], name: str, why: str, tmp_path: Path
) -> None:
    folder = recorded(tmp_path / "dump", program)
    tool = [op["name"] for op in json.loads((folder / INDEX).read_text())["ops"]]
    name = next(one for one in tool if name in one)
    with pytest.raises(ResultError, match=why):
        replay(folder, name)


def test_a_dump_without_calls_is_refused(tmp_path: Path) -> None:
    tool = Dump(values=["inputs", "outputs"], everything=True, folder=tmp_path / "dump")
    with amanda.apply(tool):
        torch.relu(X)
    tool.result()
    with pytest.raises(ResultError, match="dump:calls=true"):
        replay(tmp_path / "dump", "relu")


def test_the_command(tmp_path: Path) -> None:
    folder = str(recorded(tmp_path / "dump", lambda: torch.tanh(X)))

    def run(*arguments: str) -> tuple[object, str]:
        result = CliRunner().invoke(command, [folder, *arguments], standalone_mode=False)
        return result.return_value if result.exception is None else result.exception, result.output

    status, text = run("--op", "tanh")
    assert status == 0
    assert "the same bit for bit" in text
    status, text = run("--op", "tanh", "--dtype", "float16", "--json")
    assert status == 1
    assert json.loads(text)["format"] == "amanda.replay/1"
    for arguments in (("--op", "tan"), ("--op", "tanh", "--step", "3"), ()):
        assert getattr(run(*arguments)[0], "exit_code", None) == 3
    for arguments in (("--device", "cuda:77"), ("--dtype", "float7")):
        assert isinstance(run("--op", "tanh", *arguments)[0], ResultError)


def test_arguments_are_made_again() -> None:
    values = (1, -0.0, "a", None, True, [2, (3,)], slice(1, None), ..., 2j, float("inf"))
    text = json.dumps(encoded(values, UNKNOWN, "0"))

    def tensor(place: str, form: list[int]) -> object:
        return place, form

    assert repr(decoded(json.loads(text), tensor, str, "x")) == repr(values)
    assert decoded([{"tensor": "1"}, {"tensor": ["2.0", 1, 4, 1]}], tensor, str, "x") == [
        ("1", []),
        ("2.0", [1, 4, 1]),
    ]
    with pytest.raises(UnknownArgumentError, match="the argument 'x' is unknown: object"):
        decoded(encoded(object(), UNKNOWN, "0"), tensor, str, "x")
    with pytest.raises(UnknownArgumentError, match="malformed"):
        decoded({"slice": 3}, tensor, str, "x")
