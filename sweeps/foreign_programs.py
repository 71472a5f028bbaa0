"""The programs of `foreign`, and how often each of their ops runs, by their own loops.

Long, since it is a list.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch and the libraries leave much untyped.

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .foreign import Note, Program

PROGRAMS: dict[str, Program] = {}

#: Why the values of some ops are not copied in a program.
WRITTEN = "the program writes through this view, and a copied view is no view of its base any more"

COMPILED = r"compiled|eagerly"
TRANSFORMS = r"torch\.func"


def program(
    name: str,
    counts: Mapping[str, int] | None = None,
    backward: Mapping[str, int] | None = None,
    **options: Any,
) -> Callable[[Callable[[Note], None]], Callable[[Note], None]]:
    """Enter a program into the list."""

    def enter(run: Callable[[Note], None]) -> Callable[[Note], None]:
        PROGRAMS[name] = Program(name, run, counts or {}, backward or {}, **options)
        return run

    return enter


# What they share: a net of two linear layers, and 12 samples of 6 features in 3 classes.


def net() -> nn.Sequential:
    """The net, with random weights."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def samples() -> TensorDataset:
    """The samples."""
    return TensorDataset(torch.randn(12, 6), torch.randint(0, 3, (12,)))


def train(note: Note, model: Any, data: Any, optimizer: Any = None) -> None:
    """An epoch."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for features, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        note.training(model, loss)


#: Of one epoch of three batches.
EPOCH = {"linear": 6, "relu": 3, "dropout": 3, "cross_entropy_loss": 3}
EPOCH_BACKWARD = {"AddmmBackward0": 6, "ReluBackward0": 3, "NllLossBackward0": 3}


def times(number: int, counts: Mapping[str, int]) -> dict[str, int]:
    """The counts of several such epochs."""
    return {op_type: number * count for op_type, count in counts.items()}


# Training loops of others.


@program(
    "lightning: fit, validate, checkpoint",
    # Two epochs of three batches, and after each a validation of two.
    {"linear": 20, "relu": 10, "cross_entropy_loss": 10},
    times(2, EPOCH_BACKWARD),
    needs=("lightning",),
)
def lightning_loop(note: Note) -> None:
    """A LightningModule with validation, a checkpoint and a schedule."""
    import lightning

    class Lit(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            note(f"loss {self.current_epoch} {index}", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validated", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    lit = Lit()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            gradient_clip_val=0.5,
            default_root_dir=folder,
        )
        data = samples()
        trainer.fit(lit, DataLoader(data, 4, shuffle=True), DataLoader(data, 6))
        (path,) = Path(folder).glob("**/*.ckpt")
        note("checkpoint", torch.load(path, weights_only=False)["state_dict"])
    note("parameters", list(lit.parameters()))
    note("validated", trainer.callback_metrics["validated"])


@program(
    "accelerate: prepare, accumulate, clip, save",
    times(2, EPOCH),
    times(2, EPOCH_BACKWARD),
    needs=("accelerate",),
)
def accelerate_loop(note: Note) -> None:
    """A loop of accelerate's, with gradients accumulated over two batches."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loader = DataLoader(samples(), 4, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        for _ in range(2):
            for features, labels in loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(features), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        note("norm", accelerator.clip_grad_norm_(model.parameters(), 0.5))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                note("gathered", accelerator.gather_for_metrics(loss.detach()))
                note.training(model, loss)
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
        note("unwrapped", list(accelerator.unwrap_model(model).parameters()))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@program(
    "transformers: Trainer",
    {"embedding": 12},
    needs=("accelerate", "transformers"),
)
def trainer_loop(note: Note) -> None:
    """The Trainer of transformers: two epochs of three batches of a small GPT-2."""
    import transformers

    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=16)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 16, (12, 5))
    data = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
            logging_strategy="no",
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        result = trainer.train()
    note("loss", torch.tensor(result.training_loss))
    note("parameters", list(model.parameters()))


# Data.


def in_a_worker(batch: list[Any]) -> Any:
    """Puts a batch together, with operators, in a worker."""
    features, labels = (torch.stack(part) for part in zip(*batch, strict=True))
    return features * 2 + torch.rand(()), labels


def _loader(method: str, workers: int) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        loader = DataLoader(
            samples(),
            4,
            shuffle=True,
            num_workers=workers,
            collate_fn=in_a_worker,
            multiprocessing_context=method if workers else None,
            persistent_workers=bool(workers),
        )
        model = net()
        for _ in range(2):
            train(note, model, loader)

    return run


for _method, _workers in (("fork", 2), ("spawn", 1), ("none", 0)):
    program(
        f"data loader: {_workers} workers by {_method}",
        times(2, EPOCH),
        times(2, EPOCH_BACKWARD),
    )(_loader(_method, _workers))


# Numbers of less width.


@program("autocast and GradScaler", EPOCH, {"ReluBackward0": 3, "NllLossBackward0": 3})
def autocast(note: Note) -> None:
    """Mixed precision on the CPU, with scaled gradients that are clipped."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for features, labels in DataLoader(samples(), 4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(features)
            with torch.autocast("cpu", enabled=False):
                loss = F.cross_entropy(output.float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        note("output", output)
        note.training(model, loss)
        note(f"scale {scaler.get_scale()}", scaler.get_scale())


@program("dtypes: double, half, complex, integers", {"matmul": 4})
def dtypes(note: Note) -> None:
    """The same in several dtypes, with conversions between them."""
    for dtype in (torch.double, torch.half, torch.bfloat16, torch.cfloat):
        weight = torch.randn(4, 4).to(dtype).requires_grad_()
        result = torch.randn(3, 4).to(dtype) @ weight
        (result.abs().double() * torch.arange(4)).sum().backward()
        note(str(dtype), [result, weight.grad])


# Gradient checkpointing.


def _checkpointed(reentrant: bool) -> Callable[[Note], None]:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    def run(note: Note) -> None:
        first, second = net(), nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        model = nn.ModuleList([first, second])

        def forward(x: torch.Tensor) -> Any:
            hidden = checkpoint(first, x, use_reentrant=reentrant)
            return checkpoint_sequential(second, 2, hidden, use_reentrant=reentrant)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for features, labels in DataLoader(samples(), 4):
            optimizer.zero_grad()
            # The reentrant kind wants an input that requires gradients.
            loss = F.cross_entropy(forward(features.requires_grad_()), labels)
            loss.backward()
            optimizer.step()
            note("gradient of the input", features.grad)
            note.training(model, loss)

    return run


for _reentrant in (False, True):
    # Of each layer one execution and one more when it is recomputed, but for the last segment.
    program(
        f"gradient checkpointing: use_reentrant={_reentrant}",
        {"cross_entropy_loss": 3},
        {"AddmmBackward0": 3 * 6, "ReluBackward0": 3},
    )(_checkpointed(_reentrant))


# Compilers.


def _compiled(backend: str) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        torch._dynamo.reset()
        model = net()
        part: Any = nn.Sequential(model[0], nn.Tanh())
        model[0] = torch.compile(part, backend=backend)  # type: ignore[assignment]
        eagerly: Any = contextlib.nullcontext()
        if note.plain and backend == "inductor":
            # Its kernels round otherwise than the operators that run where tools are applied.
            eagerly = torch.compiler.set_stance("force_eager")
        with eagerly:
            train(note, model, DataLoader(samples(), 4))
        torch._dynamo.reset()

    return run


for _backend in ("eager", "aot_eager", "inductor"):
    program(
        f"compiled parts: {_backend}",
        {**EPOCH, "tanh": 3},
        EPOCH_BACKWARD,
        notice=COMPILED,
    )(_compiled(_backend))


@program("export, save, load, run", {"linear": 4, "relu": 2}, {"AddmmBackward0": 2})
def export(note: Note) -> None:
    """Export a module, write and read it, and train what came back."""
    model, features = net().eval(), torch.randn(4, 6)
    exported = torch.export.export(model, (features,))
    note("graph", exported.graph_module.code)
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    module = torch.export.load(stored).module()
    note("output", model(features))
    loss = module(features).square().sum()
    loss.backward()
    note("gradients", [parameter.grad for parameter in module.parameters()])


@program("jit: script, trace, save, load", {"linear": 2, "relu": 1})
def scripts(note: Note) -> None:
    """Scripted and traced modules, run with gradients; each is one opaque op."""
    model, features = net().eval(), torch.randn(4, 6)
    for made in (torch.jit.script(model), torch.jit.trace(model, features)):
        stored = io.BytesIO()
        torch.jit.save(made, stored)
        stored.seek(0)
        loaded = torch.jit.load(stored)
        note("code", loaded.code)
        for module in (made, loaded):
            module(features).sum().backward()
            note("gradients", [parameter.grad for parameter in module.parameters()])
    note("output", model(features))


@program("fx: symbolic trace, transform, run", {"linear": 4, "relu": 1, "tanh": 1})
def fx(note: Note) -> None:
    """Trace a module, put another op into the graph, run both."""
    model, features = net().eval(), torch.randn(4, 6)
    traced = torch.fx.symbolic_trace(model)
    note("code", traced.code)
    for node in traced.graph.nodes:
        if node.op == "call_module" and node.target == "1":
            with traced.graph.inserting_after(node):
                new = traced.graph.call_function(torch.tanh, (node.args[0],))
            node.replace_all_uses_with(new)
            traced.graph.erase_node(node)
            break
    traced.recompile()
    note("changed", traced(features))
    note("output", model(features))


@program("fake tensors, meta device", {"linear": 2, "relu": 1})
def fake(note: Note) -> None:
    """Shapes without values, then values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = net().eval()
    with FakeTensorMode(allow_non_fake_inputs=True):
        shaped = model(torch.empty(5, 6))
        note("shape", tuple(shaped.shape))
    with torch.device("meta"):
        empty = net()
    note("meta", [tuple(p.shape) for p in empty.parameters()])
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    note("output", filled.eval()(torch.randn(4, 6)))


# Function transforms.


@program("torch.func: grad, vmap, jacrev, hessian", {"exp": 1}, notice=TRANSFORMS)
def transforms(note: Note) -> None:
    """Transforms of functions, nested, and an op outside them."""
    from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(3, 4)
    note("vmap", vmap(function)(x))
    note("grad", grad(function)(x))
    note("vmap of grad", vmap(grad(function))(x))
    note("jacrev", jacrev(torch.sin)(x[0]))
    note("jacfwd", jacfwd(torch.sin)(x[0]))
    note("hessian", hessian(function)(x[0]))
    note("jvp", jvp(function, (x,), (torch.ones_like(x),)))
    made: Any = vjp(function, x)
    note("vjp", (made[0], made[1](torch.ones(()))))
    note("outside", x.exp())


@program(
    "torch.func: functional_call, ensembles, per-sample gradients",
    {"linear": 2, "relu": 1},
    notice=TRANSFORMS,
)
def functional(note: Note) -> None:
    """Modules as functions of their parameters."""
    from torch.func import functional_call, grad, stack_module_state, vmap

    models: Any = [net().eval() for _ in range(3)]
    features, labels = torch.randn(4, 6), torch.randint(0, 3, (4,))
    state = {name: p.detach() * 2 for name, p in models[0].named_parameters()}
    note("called", functional_call(models[0], state, (features,)))
    stacked, buffers = stack_module_state(models)

    def one(parameters: Any, data: Any) -> Any:
        return functional_call(models[0], (parameters, buffers), (data,))

    note("ensemble", vmap(one, (0, None))(stacked, features))

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(functional_call(models[0], parameters, (x[None],)), y[None])

    note("per sample", list(vmap(grad(loss), (None, 0, 0))(state, features, labels).values()))


# Copies and files.


@program("pickle, deepcopy, save, load", {"linear": 8, "relu": 4, "dropout": 4})
def copies(note: Note) -> None:
    """Copies of a model, by all ways, each of which runs; their bytes are those without tools."""
    model, features = net(), torch.randn(4, 6)
    stored, whole = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), stored)
    torch.save(model, whole)
    pickled = pickle.dumps(model)
    # Pickled alone, a storage carries its address.
    note("bytes", (stored.getvalue(), whole.getvalue()))
    stored.seek(0)
    whole.seek(0)
    loaded = net()
    loaded.load_state_dict(torch.load(stored))
    others = [
        loaded,
        torch.load(whole, weights_only=False),
        pickle.loads(pickled),
        copy.deepcopy(model),
    ]
    for other in others:
        note("output", other(features))
        note("parameters", list(other.parameters()))
    result = others[-1][0].weight * 1
    note("views", (copy.deepcopy(result.detach()), pickle.loads(pickle.dumps(result.detach()))))


# The user's own hooks.


@program("hooks of the user's", EPOCH, EPOCH_BACKWARD)
def hooks(note: Note) -> None:
    """Every kind of hook, noting what it is called with, some changing it."""
    model, order = net(), list[str]()

    def heard(name: str, *values: Any) -> None:
        order.append(name)
        note(f"{order.count(name)} {name}", values)

    def at_node(name: str, *values: Any) -> None:
        # Where the loss is a copy, its node is the copy's.
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


# What watches the program.


@program("torch.profiler", EPOCH, EPOCH_BACKWARD)
def profiled(note: Note) -> None:
    """How often each of torch's operators ran, as the profiler saw it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        train(note, net(), DataLoader(samples(), 4))
    counted = {e.key: e.count for e in seen.key_averages() if e.key.startswith("aten::")}
    # Routines get values detached, so there are more of these.
    counted.pop("aten::detach")
    note.events("seen", sorted(counted.items()))


@program("anomaly mode, deterministic algorithms", EPOCH, EPOCH_BACKWARD)
def anomalies(note: Note) -> None:
    """Torch's own checks switched on."""
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
    """Function and dispatch modes, around and beside one another."""
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
    # Routines get values detached, which the dispatch mode sees.
    note.events("names", [name for name in names if name != "aten.detach.default"])


# Further ways of training.


@program("autograd.Function, double backward, gradient penalty", {"tanh": 3})
def penalty(note: Note) -> None:
    """Gradients of gradients, through a function of the user's."""

    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        y = torch.tanh(Cubed.apply(x)).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (gradient.square().sum() + y).backward()
        note("gradients", [gradient, x.grad])


@program(
    "closures: LBFGS; averaged weights; schedules",
    left_alone=dict.fromkeys(("detach",), WRITTEN),
)
def closures(note: Note) -> None:
    """An optimizer that calls the model as often as it likes."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    (features, labels) = samples().tensors

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        return loss

    for _ in range(2):
        loss: Any = optimizer.step(closure)
        schedule.step()
        averaged.update_parameters(model)
        note.training(model, loss)
    note("averaged", list(averaged.parameters()))


OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")


@program(
    "optimizers: foreach and for-loop",
    times(2 * len(OPTIMIZERS), EPOCH),
    times(2 * len(OPTIMIZERS), EPOCH_BACKWARD),
)
def optimizers(note: Note) -> None:
    """An epoch with each optimizer, in both of its implementations."""
    for name in OPTIMIZERS:
        for foreach in (False, True):
            model = net()
            made = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=foreach)
            train(note, model, DataLoader(samples(), 4), made)


@program(
    "parametrizations and pruning",
    {"linear": 4},
    left_alone=dict.fromkeys(("diagonal", "view"), WRITTEN),
)
def parametrizations(note: Note) -> None:
    """Weights that are computed: spectral and weight norm, orthogonal, pruned, lazily made."""
    from torch.nn.utils import parametrizations, prune

    layers: list[Any] = [
        parametrizations.weight_norm(nn.Linear(6, 6)),
        parametrizations.spectral_norm(nn.Linear(6, 6)),
        parametrizations.orthogonal(nn.Linear(6, 6)),
        nn.LazyLinear(6),
    ]
    prune.random_unstructured(layers[0], "bias", amount=0.5)
    model = nn.Sequential(*layers)
    output = model(torch.randn(4, 6))
    output.square().mean().backward()
    note("output", output)
    note("parameters", list(model.parameters()))
    note("gradients", [parameter.grad for parameter in model.parameters()])


@program(
    "recurrent nets: packed sequences, states carried on",
    {"lstm": 2, "gru": 2, "lstm_cell": 3},
)
def recurrent(note: Note) -> None:
    """Recurrent layers, with hidden states handed on."""
    lstm, gru, cell = (
        nn.LSTM(3, 4, 2, dropout=0.2),
        nn.GRU(4, 4, bidirectional=True),
        nn.LSTMCell(8, 4),
    )
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 3) for n in (5, 3, 2)])
    state: Any = None
    for _ in range(2):
        output, state = lstm(packed, state)
        state = tuple(s.detach() for s in state)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output)
        both, _ = gru(padded)
        both.square().sum().backward()
        note("output", both)
    carried: Any = None
    for step in both.detach()[:3]:
        carried = cell(step, carried)
    carried[0].sum().backward()
    for layer in (lstm, gru, cell):
        note("gradients", [parameter.grad for parameter in layer.parameters()])


class Labelled(torch.Tensor):
    """A subclass that stays itself through operators."""


@program(
    "subclasses, nested and sparse tensors, views",
    {"embedding": 2},
    left_alone=dict.fromkeys(("__getitem__", "t"), WRITTEN),
)
def kinds(note: Note) -> None:
    """Tensors that are not plain."""
    labelled = torch.randn(3, 4).as_subclass(Labelled)
    note("class", type(labelled * 2 + 1).__name__)
    note("value", labelled.exp().sum())
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    note("nested", torch.nested.to_padded_tensor(nested * 2, 0.0))
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 3, 3])).square().sum().backward()
        optimizer.step()
        note("table", [table.weight, table.weight.grad])
    base = torch.randn(4, 4, requires_grad=True)
    written = base * 1
    written[1:].mul_(2)
    written.t()[0].add_(1)
    written.sum().backward()
    note("views", [written, base.grad])


@program("exceptions in the program, generators, threads", {"linear": 3})
def control(note: Note) -> None:
    """Errors that the program catches, generators left half-way, threads that run beside."""
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
    """What switches gradients on and off."""
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


# Several processes.


def _rank() -> int:
    return torch.distributed.get_rank()


@program("DDP over gloo", EPOCH, EPOCH_BACKWARD, processes=2)
def distributed(note: Note) -> None:
    """Each rank trains on its own samples; gradients are averaged."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(3)
    model = DistributedDataParallel(net())
    torch.manual_seed(_rank())
    train(note, model, DataLoader(samples(), 4))


@program("DDP: accumulation without synchronisation, buffers, unused parameters", processes=2)
def accumulating(note: Note) -> None:
    """`no_sync`, batch norm's buffers, and a branch that only one rank takes."""
    from torch.nn.parallel import DistributedDataParallel

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(6, 3), nn.Linear(6, 3), nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.norm(x)
            return self.a(x) if _rank() == 0 else self.b(x)

    torch.manual_seed(3)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(4):
        features = torch.randn(4, 6) + _rank()
        if step % 2 == 0:
            with model.no_sync():
                loss = model(features).square().mean()
                loss.backward()
        else:
            loss = model(features).square().mean()
            loss.backward()
        note.training(model, loss)


@program(
    "FSDP2 on the CPU",
    {"linear": 6, "relu": 3, "cross_entropy_loss": 3},
    {"ReluBackward0": 3},
    processes=2,
    left_alone=dict.fromkeys(("narrow", "chunk", "as_strided", "view"), WRITTEN),
)
def sharded(note: Note) -> None:
    """Parameters sharded over two processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    model: Any = net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(_rank())
    for features, labels in DataLoader(samples(), 4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        note("loss", loss)
        note("shards", [parameter.to_local() for parameter in model.parameters()])
