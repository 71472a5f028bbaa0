"""Programs with libraries that have loops, losses, environments or hooks of their own."""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-subclassing-any
# mypy: disable-error-code="import-not-found,import-untyped,attr-defined,operator,unused-ignore"
# Much in torch and the libraries is not annotated, and few of them are installed for the checks.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from maintenance.sweeps.foreign import Note

from .catalog import SAVES, WRITTEN, program
from .compilers import TRANSFORMS
from .libraries import steps


@program("fastai: a Learner with one cycle and mixup", needs=("fastai",))
def learner(note: Note) -> None:
    """Step through fastai's callbacks and its own optimizer."""
    from fastai.basics import DataLoaders, Learner
    from fastai.callback.mixup import MixUp
    from fastai.callback.schedule import fit_one_cycle  # noqa: F401  Patches the class.
    from fastai.losses import CrossEntropyLossFlat

    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    loaders = DataLoaders(DataLoader(data, 8), DataLoader(data, 8))
    learned = Learner(loaders, model, loss_func=CrossEntropyLossFlat(), cbs=[MixUp()])
    with learned.no_bar(), learned.no_logging():
        learned.fit_one_cycle(2, 0.01)
    note("parameters", list(model.state_dict().values()))


@program(
    "TorchRL: PPO's loss over TensorDicts",
    needs=("torchrl", "tensordict"),
    notice=TRANSFORMS,
)
def clipped_policy(note: Note) -> None:
    """Pass values between modules by name, and estimate advantages without gradients."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torch.distributions import Categorical
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    scores = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        scores, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    critic = ValueOperator(nn.Linear(4, 1), in_keys=["observation"])
    batch = TensorDict({"observation": torch.randn(2, 5, 4)}, [2, 5])
    with torch.no_grad():
        actor(batch)
    after = {"observation": torch.randn(2, 5, 4), "reward": torch.randn(2, 5, 1)}
    ends = {key: torch.zeros(2, 5, 1, dtype=torch.bool) for key in ("done", "terminated")}
    batch["next"] = TensorDict({**after, **ends}, [2, 5])
    GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    objective = ClipPPOLoss(actor, critic)

    def loss() -> Any:
        found = objective(batch)
        return found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]

    steps(note, objective, loss)


@program("TRL: preferences", needs=("trl",))
def preferences(note: Note) -> None:
    """Train a small language model by the loss of DPO."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from trl.trainer.utils import selective_log_softmax

    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, n_positions=16)
    model, reference = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 20, (4, 8))

    def scored(network: Any) -> Any:
        logits = network(tokens).logits[:, :-1]
        return selective_log_softmax(logits, tokens[:, 1:]).sum(-1)

    def loss() -> Any:
        with torch.no_grad():
            base = scored(reference)
        better, worse = (scored(model) - base).chunk(2)
        return -F.logsigmoid(0.1 * (better - worse)).mean()

    steps(note, model, loss, 2)


@program("Ignite: a trainer with handlers and metrics", needs=("ignite",))
def engine(note: Note) -> None:
    """Run a loop that is an engine with events."""
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import EMAHandler
    from ignite.metrics import Accuracy, Loss

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    batches = DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(0, 3, (12,))), 4)
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
    average = EMAHandler(model, momentum=0.1)
    average.attach(trainer, name="ema", event=Events.ITERATION_COMPLETED)
    trainer.run(batches, max_epochs=2)
    metrics: Any = {"accuracy": Accuracy(), "loss": Loss(F.cross_entropy)}
    found = create_supervised_evaluator(model, metrics).run(batches).metrics
    note("metrics", [torch.tensor(found[name]) for name in sorted(found)])
    note("parameters", [*model.parameters(), *average.ema_model.parameters()])


@program(
    "neuraloperator: a Fourier neural operator",
    needs=("neuralop",),
    left_alone={"view_as_real": WRITTEN},
)
def fourier_operator(note: Note) -> None:
    """Multiply modes of a spectrum by complex weights."""
    from neuralop.models import FNO

    model: Any = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
    x, y = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
    steps(note, model, lambda: F.mse_loss(model(x), y), 2)


@program("sbi: posterior estimation by flows", needs=("sbi",), notice=SAVES)
def posterior(note: Note) -> None:
    """Train a flow with a loop that stops early, and sample from it."""
    from sbi.inference import NPE
    from torch.distributions import MultivariateNormal

    prior = MultivariateNormal(torch.zeros(2), torch.eye(2))
    theta = prior.sample((60,))
    x = theta + 0.1 * torch.randn(60, 2)
    inference = NPE(prior, density_estimator="maf", show_progress_bars=False)
    inference.append_simulations(theta, x)
    net = inference.train(training_batch_size=20, max_num_epochs=2)
    note("parameters", list(net.parameters()))
    found = inference.build_posterior(net)
    note("samples", found.sample((5,), x=torch.zeros(2), show_progress_bars=False))


@program("Kornia: augmentation and geometry", needs=("kornia",))
def augmented(note: Note) -> None:
    """Differentiate warps, filters and colors."""
    import kornia

    x = torch.rand(2, 3, 16, 16, requires_grad=True)
    blurred = kornia.filters.gaussian_blur2d(x, (3, 3), (1.0, 1.0))
    turned = kornia.geometry.rotate(blurred, torch.tensor([10.0, 20.0]))
    edges = kornia.filters.sobel(kornia.color.rgb_to_hsv(turned))
    edges.sum().backward()
    note("gradients", [edges, x.grad])
    jitter: Any = kornia.augmentation.AugmentationSequential(
        kornia.augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=1.0),
        kornia.augmentation.RandomAffine(10.0, p=1.0),
    )
    note("augmented", jitter(x.detach()))


@program("Metric learning: miners and losses", needs=("pytorch_metric_learning",))
def metric_learning(note: Note) -> None:
    """Choose pairs by indices that differ in number from step to step."""
    from pytorch_metric_learning import losses, miners

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    x, labels = torch.randn(16, 6), torch.randint(0, 4, (16,))
    mine, triplet = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()
    proxies = losses.ProxyAnchorLoss(num_classes=4, embedding_size=4)
    everything = nn.ModuleList([model, proxies])

    def loss() -> Any:
        found = model(x)
        return triplet(found, labels, mine(found, labels)) + proxies(found, labels)

    steps(note, everything, loss)


@program("Tianshou: a policy over batches", needs=("tianshou",))
def batches_of_a_policy(note: Note) -> None:
    """Compute returns by numba between operators."""
    from tianshou.data import Batch
    from tianshou.utils.net.common import Net

    net: Any = Net(state_shape=(4,), action_shape=(2,), hidden_sizes=[8])
    batch = Batch(obs=torch.randn(6, 4), act=torch.randint(0, 2, (6,)))

    def loss() -> Any:
        logits, _ = net(batch.obs)
        return F.cross_entropy(logits, batch.act)

    steps(note, net, loss, 2)
