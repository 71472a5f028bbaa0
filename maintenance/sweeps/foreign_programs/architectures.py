"""Programs with models of libraries: images, speech, text, state spaces, spikes, and splines."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped,attr-defined,unused-ignore"
# Much in torch and the libraries is not annotated, and few of them are installed for the checks.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from maintenance.sweeps.foreign import Note

from .catalog import PASSED, SAVES, program
from .libraries import steps

_VISION = "maintenance.sweeps.foreign_programs.vision_kernels"


@program(
    "timm: a vision transformer, a network with gates, and an average",
    needs=(_VISION, "timm"),
    notice=SAVES,  # The average reads it.
)
def images(note: Note) -> None:
    """Train with timm's loss, clipping, scheduler, and average of weights."""
    import timm
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    for name, options in (("vit_tiny_patch16_224", sizes), ("test_efficientnet", {})):
        model = timm.create_model(name, num_classes=4, **options)
        optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05)
        schedule = CosineLRScheduler(optimizer, t_initial=3)
        average = ModelEmaV3(model, decay=0.9)
        images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 4, (4,))
        for step in range(2):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            average.update(model, step=step)
            schedule.step(step + 1)
            note.training(model, loss)
        note(f"{name}, average", average.module(images))


@program("open_clip: images and texts", needs=(_VISION, "open_clip"))
def pairs(note: Note) -> None:
    """Train a CLIP with the contrastive loss."""
    import open_clip

    model = open_clip.CLIP(
        embed_dim=16,
        vision_cfg={"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32},
        text_cfg={"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
    )
    lossy = open_clip.ClipLoss()
    images, texts = torch.randn(4, 3, 32, 32), torch.randint(1, 64, (4, 8))
    steps(note, model, lambda: lossy(*model(images, texts)), 2)
    model.eval()
    # Tools that look inside take the fused path off, and its slow counterpart rounds otherwise.
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        note("features", [model.encode_image(images), model.encode_text(texts)])
    torch.backends.mha.set_fastpath_enabled(True)


@program("Whisper: transcription with cached keys", needs=("whisper",))
def speech(note: Note) -> None:
    """Encode a spectrogram, and decode greedily through hooks that keep keys and values."""
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(80, 20, 32, 2, 1, 60, 8, 32, 2, 1)).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding)
    tokens, sound = torch.randint(0, 60, (1, 3)), torch.randn(1, 80, 40)
    with torch.no_grad():
        encoded = model.embed_audio(sound)
        cache, hooks = model.install_kv_cache_hooks()
        feed = tokens
        for _ in range(3):
            logits = model.decoder(feed, encoded, kv_cache=cache)
            feed = logits[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, feed), 1)
        for hook in hooks:
            hook.remove()
    note("tokens", tokens)
    note("logits", logits)
    model.train()
    steps(note, model, lambda: model(sound, tokens[:, :-1]).square().mean(), 2)


@program("pykan: splines on edges", needs=("kan",))
def splines(note: Note) -> None:
    """Fit a function. Its sums are not the same to the last bit in two plain runs."""
    from kan import KAN

    model = KAN(width=[2, 3, 1], grid=3, k=3, seed=0, auto_save=False, symbolic_enabled=False)
    x = torch.rand(24, 2) * 2 - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:] ** 2
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        note("loss", loss.detach().round(decimals=4))
    model.eval()
    with torch.no_grad():
        note("fit", model(x).round(decimals=3))


@program("mambapy: a state space with a parallel scan", needs=("mambapy.mamba",))
def state_space(note: Note) -> None:
    """Train by the parallel scan, and run step by step with a cache."""
    from mambapy.mamba import Mamba, MambaConfig

    model = Mamba(MambaConfig(d_model=8, n_layers=2, d_state=4))
    x = torch.randn(2, 6, 8)
    steps(note, model, lambda: model(x).square().mean(), 2)
    model.eval()
    caches: list[Any] = [
        (None, torch.zeros(2, model.config.d_inner, model.config.d_conv - 1)) for _ in range(2)
    ]
    with torch.no_grad():
        for position in range(3):
            y, caches = model.step(x[:, position], caches)
            note(f"step {position}", y)


@program("xLSTM: matrices as memory", needs=("xlstm",))
def matrix_memory(note: Note) -> None:
    """Train blocks of both kinds."""
    from xlstm import (
        FeedForwardConfig,
        mLSTMBlockConfig,
        mLSTMLayerConfig,
        sLSTMBlockConfig,
        sLSTMLayerConfig,
        xLSTMBlockStack,
        xLSTMBlockStackConfig,
    )

    matrix = mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2)
    scalar = sLSTMLayerConfig(backend="vanilla", num_heads=2, conv1d_kernel_size=4)
    config = xLSTMBlockStackConfig(
        mlstm_block=mLSTMBlockConfig(mlstm=matrix),
        slstm_block=sLSTMBlockConfig(slstm=scalar, feedforward=FeedForwardConfig(proj_factor=1.3)),
        context_length=8,
        num_blocks=2,
        embedding_dim=16,
        slstm_at=[1],
    )
    model, x = xLSTMBlockStack(config), torch.randn(2, 8, 16)
    steps(note, model, lambda: model(x).square().mean(), 2)


@program("snntorch: spikes with surrogate gradients", needs=("snntorch",))
def spikes(note: Note) -> None:
    """Train leaky neurons over time."""
    import snntorch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(6, 8)
            self.spiking = snntorch.Leaky(beta=0.9, learn_beta=True)
            self.last = torch.nn.Linear(8, 3)
            self.reading = snntorch.Leaky(beta=0.8, reset_mechanism="none")

        def forward(self, x: Any) -> Any:
            memory, reading = self.spiking.init_leaky(), self.reading.init_leaky()
            found = []
            for _ in range(4):
                spike, memory = self.spiking(self.first(x), memory)
                _, reading = self.reading(self.last(spike), reading)
                found.append(reading)
            return torch.stack(found).sum(0)

    model, x, y = Net(), torch.randn(4, 6), torch.randint(0, 3, (4,))
    steps(note, model, lambda: F.cross_entropy(model(x), y))


@program("ncps: liquid networks in closed form", needs=("ncps.torch",))
def liquid(note: Note) -> None:
    """Train two kinds of cells on sequences."""
    from ncps.torch import LTC, CfC
    from ncps.wirings import AutoNCP

    x = torch.randn(2, 2, 3)
    for model in (CfC(3, 8), LTC(3, AutoNCP(8, 2), ode_unfolds=2)):
        steps(note, model, lambda model=model: model(x)[0].square().mean(), 2)


@program("vector-quantize-pytorch: codebooks", needs=("vector_quantize_pytorch",))
def codebooks(note: Note) -> None:
    """Train through a straight-through estimator, with codebooks that follow an average."""
    from vector_quantize_pytorch import FSQ, ResidualVQ

    encoder, decoder = torch.nn.Linear(6, 4), torch.nn.Linear(4, 6)
    residual = ResidualVQ(dim=4, num_quantizers=2, codebook_size=8, kmeans_init=False)
    finite = FSQ([4, 3], dim=4)
    model, x = torch.nn.ModuleList([encoder, residual, finite, decoder]), torch.randn(3, 5, 6)

    def loss() -> Any:
        found, codes, commitment = residual(encoder(x))
        levels, _ = finite(found)
        note("codes", codes)
        return (decoder(levels) - x).square().mean() + commitment.sum()

    steps(note, model, loss, 2)


@program(
    "denoising-diffusion-pytorch: noise and samples", needs=(_VISION, "denoising_diffusion_pytorch")
)
def diffusion(note: Note) -> None:
    """Train a small U-Net with attention, and sample."""
    from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

    unet = Unet1D(dim=8, dim_mults=(1, 2), channels=2)
    model = GaussianDiffusion1D(unet, seq_length=8, timesteps=4)
    x = torch.rand(2, 2, 8)
    steps(note, model, lambda: model(x), 2)
    note("samples", model.sample(batch_size=1))


@program("performer-pytorch: attention by random features", needs=("performer_pytorch",))
def features(note: Note) -> None:
    """Train a language model whose projections are drawn again."""
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=20, dim=16, depth=2, heads=2, max_seq_len=8, causal=False)
    tokens = torch.randint(0, 20, (2, 8))
    steps(note, model, lambda: model(tokens).square().mean(), 2)


@program(
    "segmentation-models-pytorch: a U-Net on an encoder",
    needs=(_VISION, "segmentation_models_pytorch"),
)
def segmentation(note: Note) -> None:
    """Train with the loss of Dice."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", 3, None, decoder_channels=(8, 8, 4))
    lossy = smp.losses.DiceLoss("binary")
    x, y = torch.randn(2, 3, 32, 32), (torch.rand(2, 1, 32, 32) > 0.5).float()
    steps(note, model, lambda: lossy(model(x), y), 2)


@program("loralib: adapters that are merged", needs=("loralib",))
def adapters(note: Note) -> None:
    """Train what is not frozen, and merge it into the weights at `eval`."""
    import loralib

    model = torch.nn.Sequential(
        loralib.Embedding(10, 8, r=2),
        loralib.Linear(8, 8, r=2),
        loralib.MergedLinear(8, 6, r=2, enable_lora=[True, False, True]),
    )
    loralib.mark_only_lora_as_trainable(model)
    tokens = torch.randint(0, 10, (2, 4))
    steps(note, model, lambda: model(tokens).square().mean(), 2)
    model.eval()
    note("merged", model(tokens))
    model.train()
    note("apart", model(tokens))


@program("siren-pytorch: an image as a function", needs=("siren_pytorch",))
def fields(note: Note) -> None:
    """Fit values and second derivatives of a network of sines."""
    from siren_pytorch import SirenNet

    model = SirenNet(dim_in=2, dim_hidden=8, dim_out=1, num_layers=2)
    x = torch.rand(10, 2, requires_grad=True)

    def loss() -> Any:
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x, create_graph=True)
        return (y - x[:, :1]).square().mean() + second.square().mean()

    steps(note, model, loss, 2)


@program(
    "torchsde: gradients of a stochastic equation",
    needs=("torchsde",),
    left_alone={"_SdeintAdjointMethod": PASSED},
)
def stochastic(note: Note) -> None:
    """Solve with noise that is drawn again backward."""
    import torchsde

    class Equation(torch.nn.Module):
        noise_type, sde_type = "diagonal", "stratonovich"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def f(self, t: Any, y: Any) -> Any:
            return self.drift(y).tanh()

        def g(self, t: Any, y: Any) -> Any:
            return 0.1 * self.spread(y).sigmoid()

    model, start, times = Equation(), torch.ones(2, 3), torch.linspace(0, 1, 3)

    def loss() -> Any:
        noise = torchsde.BrownianInterval(0.0, 1.0, size=(2, 3), entropy=1)
        found = torchsde.sdeint_adjoint(model, start, times, bm=noise, method="midpoint", dt=0.25)
        return found[-1].square().mean()

    steps(note, model, loss, 2)


@program("ema-pytorch: an average that is evaluated", needs=("ema_pytorch",))
def averages(note: Note) -> None:
    """Follow the weights of a model while it trains."""
    from ema_pytorch import EMA

    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)),
        torch.randn(6, 4),
    )
    average = EMA(model, beta=0.9, update_after_step=0, update_every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        average.update()
        note.training(model, loss)
    note("average", average(x))


@program("RWKV: a recurrent language model, from a file", needs=("rwkv.model",), notice=SAVES)
def recurrent(note: Note) -> None:
    """Run on a prompt, and token by token with a state."""
    import tempfile
    from pathlib import Path

    from rwkv.model import RWKV

    width, layers, words = 64, 2, 24
    weights = {"emb.weight": torch.randn(words, width) * 0.1}
    for layer in range(layers):
        at, ffn = f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        for name in ("ln1", "ln2", *(("ln0",) if layer == 0 else ())):
            weights[f"blocks.{layer}.{name}.weight"] = torch.ones(width)
            weights[f"blocks.{layer}.{name}.bias"] = torch.zeros(width)
        for name in ("time_decay", "time_first"):
            weights[at + name] = torch.rand(width)
        for name in ("time_mix_k", "time_mix_v", "time_mix_r"):
            weights[at + name] = torch.rand(1, 1, width)
        for name in ("key", "value", "receptance", "output"):
            weights[f"{at}{name}.weight"] = torch.randn(width, width) * 0.1
        for name in ("time_mix_k", "time_mix_r"):
            weights[ffn + name] = torch.rand(1, 1, width)
        weights[ffn + "key.weight"] = torch.randn(4 * width, width) * 0.1
        weights[ffn + "receptance.weight"] = torch.randn(width, width) * 0.1
        weights[ffn + "value.weight"] = torch.randn(width, 4 * width) * 0.1
    weights["ln_out.weight"], weights["ln_out.bias"] = torch.ones(width), torch.zeros(width)
    weights["head.weight"] = torch.randn(words, width) * 0.1
    with tempfile.TemporaryDirectory() as folder:
        torch.save(weights, Path(folder, "model.pth"))
        model = RWKV(model=str(Path(folder, "model")), strategy="cpu fp32", verbose=False)
    with torch.no_grad():
        logits, state = model.forward([1, 2, 3], None)
        for _ in range(3):
            logits, state = model.forward([int(logits.argmax())], state)
    note("logits", logits)
    note("state", state)
