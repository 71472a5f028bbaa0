"""Programs with libraries that build on PyTorch: their own modules, functions and optimizers."""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-subclassing-any
# mypy: disable-error-code="import-not-found,import-untyped,attr-defined,operator,unused-ignore"
# Much in torch and the libraries is not annotated, and few of them are installed for the checks.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from maintenance.sweeps.foreign import Note

from .catalog import PASSED, WRITTEN, program


def steps(note: Note, model: nn.Module, loss_of: Any, count: int = 3) -> None:
    """Train a model for some steps with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        note.training(model, loss)


@program("GPyTorch: an exact Gaussian process", needs=("gpytorch",))
def exact_process(note: Note) -> None:
    """Use linear operators that are functions of their own, and differentiate Cholesky factors."""
    import gpytorch

    class Process(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x = torch.linspace(0, 1, 30)
    y = torch.sin(6 * x) + 0.1 * torch.randn(30)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Process(x, y, likelihood)
    likely = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    steps(note, model, lambda: -likely(model(x), y))
    model.eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        found = likelihood(model(torch.linspace(0, 1, 7)))
    note("prediction", [found.mean, found.variance])


@program(
    "BoTorch: a fit, and the maximum of an acquisition",
    needs=("botorch",),
    left_alone={"diagonal": WRITTEN},
)
def bayesian(note: Note) -> None:
    """Call modules before the model is one itself, and optimize by SciPy."""
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    x = torch.rand(8, 2, dtype=torch.double)
    y = -(x - 0.5).square().sum(-1, keepdim=True)
    model = SingleTaskGP(x, y)
    few: dict[str, Any] = {"options": {"maxiter": 3}}
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs=few)
    note("fitted", list(model.parameters()))
    points = torch.rand(4, 1, 2, dtype=torch.double, requires_grad=True)
    acquisition = LogExpectedImprovement(model, y.max())
    improvement = acquisition(points)
    improvement.sum().backward()
    note("improvement", [improvement, points.grad])
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
    note("maximum", list(optimize_acqf(acquisition, bounds, 1, 1, 4, **few)))


@program("Pyro: variational inference and NUTS", needs=("pyro",))
def inference(note: Note) -> None:
    """Run a program again and again, with values of other shapes."""
    import pyro
    from pyro import distributions, infer

    x = torch.randn(20, 3)
    y = x @ torch.tensor([1.0, 2.0, 3.0])

    def model(x: Any, y: Any) -> None:
        normal = distributions.Normal(torch.zeros(3), 1.0).to_event(1)
        weight = pyro.sample("weight", normal)
        with pyro.plate("data", 20):
            pyro.sample("observed", distributions.Normal(x @ weight, 0.5), obs=y)

    pyro.clear_param_store()
    guide = infer.autoguide.AutoNormal(model)
    optimizer = pyro.optim.ClippedAdam({"lr": 0.02})
    inferred = infer.SVI(model, guide, optimizer, infer.Trace_ELBO())
    note("losses", [torch.tensor(inferred.step(x, y)) for _ in range(3)])
    note("parameters", dict(pyro.get_param_store().items()))
    kernel = infer.NUTS(model, max_tree_depth=2)
    chain = infer.MCMC(kernel, num_samples=3, warmup_steps=2, disable_progbar=True)
    chain.run(x, y)
    note("samples", chain.get_samples())


@program("PyG: graph convolutions", needs=("torch_geometric",))
def graph_convolutions(note: Note) -> None:
    """Gather and scatter messages by indices."""
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

    edges, x = torch.randint(0, 20, (2, 60)), torch.randn(20, 8)
    model = nn.ModuleList([GCNConv(8, 16), GATConv(16, 4, heads=2), SAGEConv(8, 3)])

    def loss() -> Any:
        hidden = x
        for layer in model:
            hidden = layer(hidden, edges).relu()
        return global_mean_pool(hidden, torch.arange(20) // 10).square().sum()

    steps(note, model, loss)


@program(
    "torchdiffeq: an ODE by its adjoint",
    needs=("torchdiffeq",),
    left_alone={"OdeintAdjointMethod": PASSED},
)
def adjoint(note: Note) -> None:
    """Pass parameters to a function for their gradients; a module inside computes with them."""
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))

        def forward(self, time: Any, state: Any) -> Any:
            return self.net(state)

    model, times, first = Field(), torch.linspace(0, 1, 4), torch.randn(4, 3)
    for solve in (odeint, odeint_adjoint):
        steps(note, model, lambda solve=solve: solve(model, first, times, method="rk4").sum(), 2)


@program("Captum: attributions", needs=("captum",))
def attributions(note: Note) -> None:
    """Rewrite gradients by hooks on modules, and stack inputs in other numbers."""
    from captum import attr

    first, relu = nn.Conv2d(1, 4, 3), nn.ReLU()
    model = nn.Sequential(first, relu, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))
    x, target = torch.randn(2, 1, 8, 8), torch.tensor([1, 2])
    note("integrated", attr.IntegratedGradients(model).attribute(x, target=target, n_steps=4))
    note("differences", attr.DeepLift(model).attribute(x, target=target))
    note("activations", attr.LayerGradCam(model, first).attribute(x, target=target))
    note("guided", attr.GuidedBackprop(model).attribute(x, target=target))


@program("Diffusers: a U-Net and its sampling", needs=("diffusers",))
def diffusion(note: Note) -> None:
    """Use a scheduler that computes with numbers in one step and with tensors in another."""
    from diffusers import DDPMScheduler, UNet2DModel

    model: Any = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )
    scheduler, x, noise = DDPMScheduler(20), torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
    times = torch.tensor([3, 7])
    noisy = scheduler.add_noise(x, noise, times)
    steps(note, model, lambda: F.mse_loss(model(noisy, times).sample, noise), 1)
    model.eval()
    scheduler.set_timesteps(3)
    with torch.no_grad():
        for time in scheduler.timesteps:
            x = scheduler.step(model(x, time).sample, time, x).prev_sample
    note("sampled", x)


@program("Stable-Baselines3: SAC", needs=("stable_baselines3",))
def actor_critic(note: Note) -> None:
    """Write averages of parameters through `.data`, in a loop over all of them."""
    from stable_baselines3 import SAC

    policy: dict[str, Any] = {"net_arch": [16]}
    agent = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        seed=0,
        device="cpu",
        learning_starts=4,
        batch_size=8,
        policy_kwargs=policy,
    )
    agent.learn(10)
    note("policy", list(agent.policy.parameters()))


@program("Opacus: gradients of single samples", needs=("opacus",))
def private_gradients(note: Note) -> None:
    """Keep activations by hooks, and clip what each sample adds."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model: Any = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,)))
    model, optimizer, batches = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    note("parameters", list(model.parameters()))


@program("e3nn: equivariant products", needs=("e3nn",))
def equivariant(note: Note) -> None:
    """Use layers that are generated by torch.fx and scripted."""
    from e3nn import o3

    product = o3.FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1x1o", "4x0e+2x1o")
    x = torch.randn(5, 10, requires_grad=True)
    harmonics = o3.spherical_harmonics("0e+1o", torch.randn(5, 3), normalize=True)
    loss = product(x, harmonics).square().sum()
    loss.backward()
    note("gradients", [loss, x.grad, *(parameter.grad for parameter in product.parameters())])


@program("MONAI: a U-Net over windows of a volume", needs=("monai",))
def volumes(note: Note) -> None:
    """Convolve in three dimensions, and stitch windows."""
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    model = UNet(3, 1, 2, channels=(4, 8), strides=(2,), num_res_units=1)
    x, y = torch.randn(1, 1, 8, 8, 8), torch.randint(0, 2, (1, 1, 8, 8, 8))
    dice: Any = DiceLoss(to_onehot_y=True, softmax=True)
    steps(note, model, lambda: dice(model(x), y), 1)
    model.eval()
    with torch.no_grad():
        note("windows", sliding_window_inference(torch.randn(1, 1, 12, 8, 8), (8, 8, 8), 2, model))


@program("x-transformers: training and generation", needs=("x_transformers",))
def language_model(note: Note) -> None:
    """Use rotary positions, and a cache of keys that grows."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=1, heads=4, rotary_pos_emb=True)
    net = TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)
    model, tokens = AutoregressiveWrapper(net), torch.randint(0, 20, (2, 16))
    steps(note, model, lambda: model(tokens), 1)
    model.eval()
    note("generated", model.generate(tokens[:, :4], 4, temperature=0.0))
