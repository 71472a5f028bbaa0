"""The tools that ship, on a jitted training step of a Flax model."""

# mypy: allow-untyped-decorators, allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export

import amanda
from amanda_driver_jax.facts import FACTS
from amanda_tools.dump import Dump
from amanda_tools.effective_path import EffectivePath
from amanda_tools.fingerprint import Fingerprint, load_fingerprint
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.summary import Summary
from amanda_tools.trace import Trace

X = jax.random.normal(jax.random.key(1), (8, 6, 6, 3))
Y = jnp.arange(8) % 4


class Net(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.out = nnx.Linear(144, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(jax.nn.relu(self.conv(x)).reshape(x.shape[0], -1))


@nnx.jit
def gradients(model: Any, x: Any) -> Any:
    def loss(model: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), Y).mean()

    return nnx.value_and_grad(loss)(model)


def run(tool: amanda.Tool, x: Any = X, steps: int = 2) -> Any:
    model = Net(nnx.Rngs(0))
    with amanda.apply(tool):
        for _ in range(steps):
            gradients(model, x)
    return tool.result()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_flops() -> None:
    ops = {op.type: op for op in run(Flops()).ops}
    convolution, product = ops["conv_general_dilated"], ops["dot_general"]
    assert convolution.calls == product.calls == 2
    # A kernel of 3 * 3 * 3 at each of 6 * 6 places for 4 channels and 8 images.
    assert convolution.macs == 2 * 27 * 36 * 4 * 8
    assert product.macs == 2 * 144 * 4 * 8
    # Nothing needs the gradients of the images.
    assert convolution.backward_macs == convolution.macs
    assert product.backward_macs == 2 * product.macs


class Tied(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.embed, self.again = nnx.Embed(10, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.tied = self.embed

    def __call__(self, x: Any) -> Any:
        return self.tied.attend(self.again(self.again(self.embed(x))))


@pytest.mark.parametrize("jitted", [False, True])
def test_a_summary_counts_a_shared_parameter_once_and_a_repeated_layer_twice(jitted: bool) -> None:
    model, tool = Tied(nnx.Rngs(0)), Summary()
    run = nnx.jit(lambda model, x: model(x)) if jitted else lambda model, x: model(x)
    with amanda.apply(tool):
        for _ in range(2):
            run(model, jnp.array([1, 2, 3]))
    result = tool.result()
    state = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert result.parameters == sum(value.size for value in state) == 60
    assert result.macs == 3 * (2 * 4 * 4 + 4 * 10)
    types = {row.module: row.type for row in result.modules}
    assert (types[""], types["again"]) == ("Tied", "Linear")


@pytest.mark.slow
def test_nonfinite_names_the_operator_and_says_that_jitted_programs_have_no_order() -> None:
    result = run(NonFinite(), X.at[0, 0, 0, 0].set(jnp.nan), steps=1)
    assert any("conv" in fault.type for fault in result.faults)
    (note,) = result.notes
    assert "checks run in any order" in note
    assert note in result.title

    eager = NonFinite()
    with amanda.apply(eager):
        jnp.log(jnp.full(3, -1.0))
    assert [fault.type for fault in eager.result().faults] == ["log"]
    assert eager.result().notes == []


def test_nonfinite_pairs_inputs_and_outputs_that_a_program_calls_in_any_order() -> None:
    @jax.jit
    def value_and_grad(x: Any, w: Any) -> Any:
        def loss(w: Any) -> Any:
            hidden = x
            for _ in range(4):
                hidden = jnp.tanh(hidden @ w) + jnp.sin(hidden)
            return hidden.sum()

        return jax.value_and_grad(loss)(w)

    tool = NonFinite()
    x, w = jax.random.normal(jax.random.key(0), (2, 16, 16))
    with amanda.apply(tool):
        value_and_grad(x, w)
        checked = tool.result().checked
        for _ in range(3):
            value_and_grad(x, w)
    result = tool.result()
    assert (result.checked, result.unchecked, result.faults) == (4 * checked, {}, [])


@pytest.mark.slow
def test_a_dump_has_the_values(tmp_path: Path) -> None:
    model = Net(nnx.Rngs(0))
    tool = Dump(folder=tmp_path)
    with amanda.apply(tool):
        gradients(model, X)
    tool.result()
    assert any(tmp_path.iterdir())


@pytest.mark.slow
def test_what_is_not_supported_is_said() -> None:
    assert any("jax" in note for note in run(EffectivePath(), steps=1).notes)


def _step(x: Any) -> Any:
    return jnp.tanh(x @ x)


def test_latency_times_a_compiled_call_as_a_whole_or_operator_by_operator() -> None:
    function, x, expected = jax.jit(_step), jnp.eye(3), np.tanh(np.eye(3))
    whole, each, seen = Latency(warmup=0), Latency(warmup=0, uncompiled=True), Trace()
    with amanda.apply(whole, seen):
        for _ in range(2):
            assert np.allclose(function(x), expected)
        assert np.allclose(jnp.tanh(x), expected)
    timed = [(op.name, op.calls) for op in whole.result().ops if op.calls]
    assert timed == [("_step/compiled_call", 2), ("tanh", 1)]
    assert "compiled_call" not in [op.type for op in seen.result().ops]
    with amanda.apply(each):
        assert np.allclose(function(np.eye(3)), expected)
        assert np.allclose(jax.jit(lambda x: function(x) + 1)(x), expected + 1)
    result = each.result()
    assert [(op.name, op.calls) for op in result.ops] == [("matmul", 2), ("tanh", 2), ("add", 1)]
    assert [step.number for step in result.steps] == [0, 1]
    assert any("operator by operator" in note for note in result.notes)


def test_latency_waits_until_values_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(type(FACTS), "wait", lambda self, tensors: waited.append(tensors))
    with amanda.apply(Latency()):
        product = jnp.eye(3) @ jnp.eye(3)
    assert waited[-1] == (product,)


def test_results_name_programs_that_were_compiled_before() -> None:
    function, x = jax.jit(_step), jnp.eye(3)
    compiled, lowered = function.lower(x).compile(), function.lower(x)
    exported = export.export(function)(x)

    def notes(run: Callable[[], Any]) -> tuple[int, str]:
        tool = Flops(["matmul"])
        with amanda.apply(tool):
            assert np.allclose(run(), np.tanh(np.eye(3)))
        return len(tool.result().ops), "; ".join(tool.result().notes)

    for run in (lambda: compiled(x), lambda: lowered.compile()(x)):
        ops, said = notes(run)
        assert ops == 0
        assert "jax.stages.Compiled (1 call)" in said
    for run in (lambda: exported.call(x), lambda: jax.jit(exported.call)(x)):
        assert "an exported program" in notes(run)[1]
    # What was compiled under the tool has its routines.
    assert notes(lambda: function.lower(x).compile()(x)) == (1, "")


SCRIPT = """
import sys
import jax, jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.out = nnx.Linear(256, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.conv(x)).reshape(x.shape[0], -1))

def step(model, optimizer, x, y):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value

x, y = jax.random.normal(jax.random.key(1), (8, 8, 8, 1)), jnp.arange(8) % 4
model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
run = nnx.jit(step) if "jit" in sys.argv else step
for _ in range(2):
    value = run(model, optimizer, x, y)
print("trained", value)
"""
JITTED = f"jax/{jax.__version__}/jit: its graphs cannot be read"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_tools_run_on_a_training_script(tmp_path: Path, mode: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")

    def run(*command: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command, str(script), mode],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (trained,) = (line for line in done.stdout.splitlines() if line.startswith("trained"))
        return trained, done.stderr

    plain, _ = run()
    looking = ["flops", "graph", "nonfinite", "dump", "memory", "latency", "trace", "sparsity"]
    for names in (looking, ["prune:sparsity=0.5"]):
        options = [word for name in names for word in ("-t", name)]
        trained, said = run("-m", "amanda", "run", *options, "-o", f"out{len(names)}")
        if names is looking:
            assert np.isclose(float(trained.split()[1]), float(plain.split()[1]), rtol=1e-5)
            assert ("conv2d" if mode == "eager" else "conv ") in said
            assert "0 faults" in said
            assert mode == "eager" or JITTED in said
        else:
            assert trained != plain
            assert "50.0% of the weights pruned" in said


def test_scalars_of_numpy_are_no_buffers() -> None:
    key = jax.random.key(0)

    def run() -> Any:
        return jax.random.uniform(key, (3,), minval=np.float32(1), maxval=np.float32(2))

    expected = run()
    with amanda.apply(tool := Memory()):
        found = run()
    assert np.array_equal(found, expected)
    assert tool.result().ops


def test_a_compiled_call_has_the_digests_of_the_same_values_without_compilation(
    tmp_path: Path,
) -> None:
    weight = jnp.array([[0.25, 1.0, -1.0], [2.0, 0.5, 0.125]])

    def loss(weight: Any) -> Any:
        return jnp.square(jnp.array([[1.0, -2.0], [0.5, 3.0]]) @ weight).sum()

    found = []
    for name, function in (("eager", jax.grad(loss)), ("jit", jax.jit(jax.grad(loss)))):
        tool = Fingerprint()
        with amanda.apply(tool):
            function(weight)
        tool.result().write(tmp_path / name)
        run = load_fingerprint(tmp_path / name)
        kinds = [run.ops[number].type for number in run.rows["op"]]
        rows = zip(kinds, run.rows["what"].tolist(), run.rows["digest"].tolist(), strict=True)
        found.append({row for row in rows if row[0].startswith("matmul")})
    assert len(found[0]) == 5
    assert found[0] == found[1]
