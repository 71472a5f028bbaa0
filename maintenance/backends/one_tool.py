"""One source of tools over every backend that is installed here: a row of docs/backends.md each.

Each tool runs on a perceptron with the numbers of NumPy, whose results and gradients are written
out below. `python -m maintenance.backends.one_tool FILE.json` writes the rows of the frameworks
that can be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import amanda

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/portable"))

tools: Any = importlib.import_module("tools")

Array = npt.NDArray[Any]
#: Takes the input and two weights; returns the output, and where the framework has gradients those
#: of the weights, if the gradient of the output is `SEED`.
Run = Callable[[Array, Array, Array], Sequence[Array]]

_RANDOM = np.random.default_rng(7)
X, FIRST, SECOND, SEED = (
    _RANDOM.standard_normal(shape).astype(np.float32) for shape in ((5, 6), (6, 8), (8, 3), (5, 3))
)
#: Common types of a product with a weight.
PRODUCTS = ("linear", "matmul")
#: How many elements of a weight the pruning tool removes.
SPARSITY = 0.5


def _relu(h: Array) -> tuple[Array, Array]:
    return np.maximum(h, 0), (h > 0).astype(h.dtype)


def _swish(h: Array) -> tuple[Array, Array]:
    sigmoid = 1 / (1 + np.exp(-h))
    return h * sigmoid, sigmoid * (1 + h * (1 - sigmoid))


def expected(
    first: Array = FIRST,
    second: Array = SECOND,
    activation: Callable[[Array], tuple[Array, Array]] = _relu,
    scale: float = 1.0,
) -> list[Array]:
    """Return the output and the gradients of the weights, by hand."""
    hidden, slope = activation(X @ first)
    arriving = SEED @ second.T * scale * slope
    return [hidden @ second, X.T @ arriving, hidden.T @ SEED]


def pruned() -> list[Array]:
    """Return the same with masked weights, and masked gradients."""
    masks = [_mask(weight) for weight in (FIRST, SECOND)]
    output, *gradients = expected(FIRST * masks[0], SECOND * masks[1])
    return [output, *(g * mask for g, mask in zip(gradients, masks, strict=True))]


def _mask(weight: Array) -> Array:
    order = np.argsort(np.abs(weight.T).ravel(), kind="stable")
    mask = np.ones(weight.size, weight.dtype)
    mask[order[: int(SPARSITY * weight.size)]] = 0
    return mask.reshape(weight.T.shape).T


# Backends. Frameworks are looked up by name: not all of them are where types are checked.


def _torch() -> Mapping[str, Run]:
    torch: Any = importlib.import_module("torch")

    # Held, as those of a model are. The weights of a layer are (out, in).
    weights = [torch.tensor(weight.T, requires_grad=True) for weight in (FIRST, SECOND)]

    def eager(x: Array, *_: Array) -> Sequence[Array]:
        for weight in weights:
            weight.grad = None
        hidden = torch.relu(torch.nn.functional.linear(torch.tensor(x), weights[0]))
        output = torch.nn.functional.linear(hidden, weights[1])
        output.backward(torch.tensor(SEED))
        return [output.detach().numpy(), *(w.grad.numpy().T for w in weights)]

    return {"PyTorch": eager}


def _tensorflow() -> Mapping[str, Run]:
    tf: Any = importlib.import_module("tensorflow")

    def compute(x: Any, weights: Sequence[Any]) -> Any:
        with tf.GradientTape() as tape:
            output = tf.matmul(tf.nn.relu(tf.matmul(x, weights[0])), weights[1])
        return [output, *tape.gradient(output, weights, tf.constant(SEED))]

    held = [tf.Variable(FIRST), tf.Variable(SECOND)]
    function = tf.function(lambda x: compute(x, held))

    def eager(x: Array, *weights: Array) -> Sequence[Array]:
        return [found.numpy() for found in compute(tf.constant(x), held)]

    def compiled(x: Array, *weights: Array) -> Sequence[Array]:
        return [found.numpy() for found in function(tf.constant(x))]

    with tf.Graph().as_default() as graph:
        given = tf.compat.v1.placeholder(tf.float32, X.shape)
        variables = [
            tf.compat.v1.get_variable(name, initializer=value, use_resource=True)
            for name, value in (("first", FIRST), ("second", SECOND))
        ]
        output = tf.matmul(tf.nn.relu(tf.matmul(given, variables[0])), variables[1])
        gradients = tf.gradients(output, variables, tf.constant(SEED))
        initializer = tf.compat.v1.global_variables_initializer()

    def session(x: Array, *weights: Array) -> Sequence[Array]:
        with tf.compat.v1.Session(graph=graph) as running:
            running.run(initializer)
            found: Sequence[Array] = running.run([output, *gradients], {given: x})
        return found

    return {
        "TensorFlow, eager": eager,
        "TensorFlow, tf.function": compiled,
        "TensorFlow, session": session,
    }


def _jax() -> Mapping[str, Run]:
    jax: Any = importlib.import_module("jax")
    jnp: Any = importlib.import_module("jax.numpy")

    def compute(x: Any, *weights: Any) -> Any:
        def model(*weights: Any) -> Any:
            return jnp.matmul(jax.nn.relu(jnp.matmul(x, weights[0])), weights[1])

        output, pull = jax.vjp(model, *weights)
        return [output, *pull(jnp.asarray(SEED))]

    jitted = jax.jit(compute)

    def run_by(function: Callable[..., Any]) -> Run:
        return lambda *values: [np.asarray(v) for v in function(*map(jnp.asarray, values))]

    return {"JAX, eager": run_by(compute), "JAX, jit": run_by(jitted)}


def _mxnet() -> Mapping[str, Run]:
    # With its defaults, MXNet's own gradients are wrong; the driver refuses them.
    os.environ.setdefault("MXNET_MKLDNN_ENABLED", "0")
    import mxnet as mx

    class Perceptron(mx.gluon.HybridBlock):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            # The weights of a layer are (out, in).
            for name, value in (("first", FIRST), ("second", SECOND)):
                shape = value.T.shape
                setattr(self, name, self.params.get(name, shape=shape, init=mx.init.Zero()))
            self.initialize()

        def hybrid_forward(self, F: Any, x: Any, first: Any, second: Any) -> Any:
            hidden = F.relu(F.FullyConnected(x, first, no_bias=True, num_hidden=8))
            return F.FullyConnected(hidden, second, no_bias=True, num_hidden=3)

    def run_by(block: Any) -> Run:
        def run(x: Array, *weights: Array) -> Sequence[Array]:
            parameters = (block.first, block.second)
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.set_data(mx.nd.array(weight.T))
            with mx.autograd.record():
                output = block(mx.nd.array(x))
            output.backward(mx.nd.array(SEED))
            return [output.asnumpy(), *(p.grad().asnumpy().T for p in parameters)]

        return run

    hybridized = Perceptron()
    hybridized.hybridize()
    return {"MXNet, imperative": run_by(Perceptron()), "MXNet, hybridized": run_by(hybridized)}


def _mindspore() -> Mapping[str, Run]:
    import mindspore as ms

    class Perceptron(ms.nn.Cell):  # type: ignore[misc]
        """Returns the output, and its sum times `SEED`, whose gradients are those for `SEED`."""

        def __init__(self) -> None:
            super().__init__()
            self.first = ms.Parameter(ms.Tensor(FIRST), name="first")
            self.second = ms.Parameter(ms.Tensor(SECOND), name="second")
            self.seed = ms.Tensor(SEED)

        def construct(self, x: Any) -> Any:
            output = ms.ops.matmul(ms.ops.relu(ms.ops.matmul(x, self.first)), self.second)
            return (output * self.seed).sum(), output

    def run_by(mode: int) -> Run:
        ms.set_context(mode=mode)
        cell = Perceptron()
        parameters = [cell.first, cell.second]
        compute = ms.value_and_grad(cell, None, weights=parameters, has_aux=True)

        def run(x: Array, *weights: Array) -> Sequence[Array]:
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.set_data(ms.Tensor(weight))
            ms.set_context(mode=mode)
            try:
                (_, output), gradients = compute(ms.Tensor(x))
            finally:
                ms.set_context(mode=ms.PYNATIVE_MODE)
            return [one.asnumpy() for one in (output, *gradients)]

        return run

    return {
        "MindSpore, PyNative": run_by(ms.PYNATIVE_MODE),
        "MindSpore, graph mode": run_by(ms.GRAPH_MODE),
    }


def _onnxruntime() -> Mapping[str, Run]:
    onnx: Any = importlib.import_module("onnx")
    onnxruntime: Any = importlib.import_module("onnxruntime")
    helper, number = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["product"]),
        helper.make_node("Relu", ["product"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "second"], ["output"]),
    ]
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("x", number, X.shape)],
        [helper.make_tensor_value_info("output", number, SEED.shape)],
        [onnx.numpy_helper.from_array(w, n) for w, n in ((FIRST, "first"), (SECOND, "second"))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return {"ONNX Runtime": lambda x, *weights: session.run(None, {"x": x})}


#: Module of a framework -> its modes.
BACKENDS: Mapping[str, Callable[[], Mapping[str, Run]]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "jax": _jax,
    "mxnet": _mxnet,
    "mindspore": _mindspore,
    "onnxruntime": _onnxruntime,
}


# Rows.


def outcomes(run: Run) -> dict[str, str]:
    """Return what each tool does on a backend, the routines on the host and staged ones."""
    cases: list[tuple[str, Callable[[bool], Any], list[Array]]] = [
        ("count", lambda staged: tools.Count(*PRODUCTS, "relu"), expected()),
        ("prune", lambda staged: tools.MagnitudePrune(SPARSITY, staged=staged), pruned()),
        (
            "edit gradients",
            lambda staged: tools.ScaleGradient("relu", 0.5, staged=staged),
            expected(scale=0.5),
        ),
        (
            "replace",
            lambda staged: tools.ReplaceActivation("relu", staged=staged),
            expected(activation=_swish),
        ),
        ("trace", lambda staged: tools.OperatorTrace(*PRODUCTS, "relu"), expected()),
    ]
    found = {}
    for name, make, wanted in cases:
        results = [_outcome(run, make(staged), wanted) for staged in (False, True)]
        found[name] = "; ".join(dict.fromkeys(results))
    return found


def _outcome(run: Run, tool: Any, wanted: Sequence[Array]) -> str:
    plain = run(X, FIRST, SECOND)
    has_gradients = len(plain) > 1
    if isinstance(tool, tools.ScaleGradient) and not has_gradients:
        return "no gradients"
    try:
        with amanda.apply(tool):
            results = [run(X, FIRST, SECOND) for _ in range(2)]
    except Exception as error:  # Whatever a backend raises is the outcome.
        return f"{type(error).__name__}: {error}".splitlines()[0][:80]
    after = run(X, FIRST, SECOND)
    problem = _counts(tool, has_gradients)
    if not all(_same(result, wanted) for result in results):
        problem = "wrong values"
    elif not all(map(np.array_equal, after, plain)):
        problem = "not restored"
    return problem or "as by hand"


def _counts(tool: Any, has_gradients: bool) -> str:
    """Return which number of calls is wrong in two runs, or an empty string."""
    if isinstance(tool, tools.Count):
        calls = [sorted(counter.values()) for counter in (tool.forward, tool.backward)]
        wanted = [[2, 4], [2, 4] if has_gradients else []]
        return "" if calls == wanted else f"calls: {calls}"
    if isinstance(tool, tools.OperatorTrace):
        relus = [word == "relu" for word, _ in tool.executed]
        return "" if relus == [False, True, False] * 2 else f"order: {tool.executed}"
    if isinstance(tool, tools.MagnitudePrune) and len(tool.masks) != 2:
        return f"{len(tool.masks)} masks"
    return ""


def _same(found: Sequence[Array], wanted: Sequence[Array]) -> bool:
    given = wanted[: len(found)]
    return all(np.allclose(f, w, rtol=1e-4, atol=1e-5) for f, w in zip(found, given, strict=True))


def rows() -> dict[str, dict[str, str]]:
    """Return the rows of all frameworks that are installed here."""
    found = {}
    for module, modes in BACKENDS.items():
        if importlib.util.find_spec(module) is None:
            continue
        for mode, run in modes().items():
            version = getattr(sys.modules[module], "__version__", "")
            found[mode] = {"version": f"{version}, NumPy {np.__version__}", **outcomes(run)}
    return found


def problems(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the cells of rows that are not as they should be."""
    right = ("as by hand", "no gradients")
    return [
        f"{mode}, {tool}: {cell}"
        for mode, row in found.items()
        for tool, cell in row.items()
        if tool != "version" and cell not in right
    ]


if __name__ == "__main__":
    written = rows()
    Path(sys.argv[1]).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(f"Python {platform.python_version()}: {', '.join(written)}")
    sys.exit("\n".join(problems(written)) or 0)
