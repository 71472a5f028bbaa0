"""Frameworks in which faults are made: what each driver might change, and a small program.

Add another driver with one more `Framework`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from .fingerprints import Fingerprint, fingerprint

#: Runs a few operators, forward and backward, and returns the results as comparable bytes.
Program = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Framework:
    """Description of a framework for the faults.

    Attributes:
        name: Name of its driver.
        owners: Modules, and classes as ``module:Class``, that the driver might change.
        more: Returns state that is not an attribute of these.
        program: Returns a small program.
        backward: Whether its driver instruments backward in that program.
        settings: Environment variables that the driver reads; each fault is made with each setting.
    """

    name: str
    owners: tuple[str, ...]
    more: Callable[[], Fingerprint]
    program: Callable[[], Program]
    backward: bool = True
    settings: tuple[dict[str, str], ...] = ({},)

    def fingerprint(self) -> Fingerprint:
        """Return everything that could have been left changed."""
        return fingerprint(self.owners, self.more)


def _torch_state() -> Fingerprint:
    import torch

    from amanda_driver_torch import interceptor
    from amanda_driver_torch.threads.state import STATE

    hooks: Any = torch.nn.modules.module
    optimizer: Any = importlib.import_module("torch.optim.optimizer")
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "module hooks": [len(vars(hooks)[name]) for name in vars(hooks) if name.endswith("_hooks")],
        "optimizer hooks": [
            len(vars(optimizer)[name]) for name in vars(optimizer) if name.endswith("_hooks")
        ],
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "misplaced pointers": list(interceptor().misplaced),
        "of the driver": [
            STATE.attachment,
            *(bool(getattr(STATE, name)) for name in _TORCH_FLAGS),
        ],
    }


_TORCH_FLAGS = ("quiet", "opaque", "transparent", "backward", "activations")


def _torch_program() -> Program:
    import torch

    # The first import changes a few functions of torch.
    importlib.import_module("torch._dynamo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    values = torch.randn(2, 3)

    def program() -> Any:
        model.zero_grad()
        loss = model(values).square().mean()
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            return [t.detach().numpy().tobytes() for t in (loss, *grads)]

    return program


TORCH = Framework(
    "torch",
    (
        *("torch", "torch._tensor", "torch._tensor_str", "torch._ops", "torch._jit_internal"),
        *("torch.functional", "torch.overrides", "torch.linalg", "torch.nn.functional"),
        *("torch.nn.init", "torch.autograd", "torch.autograd.function", "torch.autograd.graph"),
        *("torch.autograd.variable", "torch.jit", "torch.jit._trace", "torch.export"),
        *("torch.nn.modules.module", "torch.optim.optimizer", "torch.utils.checkpoint"),
        *("torch._dynamo.eval_frame", "torch.library", "torch._higher_order_ops"),
        *("torch:Tensor", "torch._C:TensorBase", "torch._C:ScriptFunction"),
        *("torch._C:ScriptMethod", "torch.nn:Linear", "torch._C", "torch._C._nn"),
    ),
    _torch_state,
    _torch_program,
    settings=tuple({"AMANDA_TORCH_INTERCEPTOR": name} for name in ("native", "function_mode")),
)


def _tensorflow_state() -> Fingerprint:
    from amanda_driver_tf.threads import STATE

    context: Any = importlib.import_module("tensorflow.python.eager.context")
    ops: Any = importlib.import_module("tensorflow.python.framework.ops")
    names = ("functions", "graphs", "quiet", "running", "eager", "first_run", "fallbacks")
    return {
        "of the driver": [repr(getattr(STATE, name)) for name in names],
        "gradient registry": {
            name: id(entry["type"]) for name, entry in ops.gradient_registry._registry.items()
        },
        "graphs that are built": [id(graph) for graph in ops._default_graph_stack.stack],
        "callbacks of ops": list(context.context().op_callbacks),
    }


def _tensorflow_program() -> Program:
    tf: Any = importlib.import_module("tensorflow")
    values = tf.constant([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]])
    weight = tf.Variable([[0.1, 0.2], [-0.3, 0.4], [0.5, -0.6]])

    def program() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.matmul(values, weight))))
        return [t.numpy().tobytes() for t in (loss, tape.gradient(loss, weight))]

    return program


TENSORFLOW = Framework(
    "tensorflow",
    (
        *(f"tensorflow.python.eager.{name}" for name in ("context", "execute", "backprop")),
        *(f"tensorflow.python.eager.{name}" for name in ("imperative_grad", "record", "tape")),
        "tensorflow.python.eager.forwardprop",
        "tensorflow.python.eager.polymorphic_function.atomic_function",
        "tensorflow.python.eager.polymorphic_function.concrete_function",
        *("tensorflow.python.framework.ops", "tensorflow.python.framework.func_graph"),
        *("tensorflow.python.ops.gradients_util", "tensorflow.python.client.session"),
        *("tensorflow.python.pywrap_tfe", "keras.src.layers.layer", "keras.src.ops.operation"),
        "keras.src.optimizers.base_optimizer",
    ),
    _tensorflow_state,
    _tensorflow_program,
)


def _tensorflow_function() -> Program:
    tf: Any = importlib.import_module("tensorflow")
    values = tf.constant([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]])
    weight = tf.Variable([[0.1, 0.2], [-0.3, 0.4], [0.5, -0.6]])

    @tf.function  # type: ignore[untyped-decorator]
    def step(given: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.matmul(given, weight))))
        return loss, tape.gradient(loss, weight)

    return lambda: [t.numpy().tobytes() for t in step(values)]


def _tensorflow_graph() -> Program:
    tf: Any = importlib.import_module("tensorflow")
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        given = v1.placeholder(tf.float32, (2, 3))
        weight = v1.get_variable(
            "weight", initializer=tf.constant([[0.1, 0.2], [-0.3, 0.4], [0.5, -0.6]])
        )
        loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.matmul(given, weight))))
        fetches = [loss, *tf.gradients(loss, [weight])]
        session = v1.Session(graph=graph)
        session.run(v1.global_variables_initializer())
    values = {given: [[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]]}

    def program() -> Any:
        found = [array.tobytes() for array in session.run(fetches, values)]
        return [*found, graph.as_graph_def().SerializeToString(deterministic=True)]

    return program


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        TORCH,
        TENSORFLOW,
        # Each mode is another program under the same driver.
        dataclasses.replace(TENSORFLOW, name="tensorflow-function", program=_tensorflow_function),
        dataclasses.replace(TENSORFLOW, name="tensorflow-graph", program=_tensorflow_graph),
    )
}
