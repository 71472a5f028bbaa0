"""Demonstrate Amanda on a pretrained network and real photographs, without changing the network.

Run it with `nox -s demo`. It prints tables, checks what it claims, and writes one picture,
demo_output/pruning.png.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.utils import prune

import amanda
from demo_measure import interleaved_medians
from demo_model import Photo, as_batch, load_model, load_photos, predictions
from demo_report import PrunedRun, progress, show_table, write_contact_sheet
from demo_tools import CountConvolutions, ListOperators, Operator, PruneConvolutions

SPARSITIES = [0.0, 0.1, 0.2, 0.3, 0.5, 0.7]
PICTURE = Path(__file__).resolve().parents[2] / "demo_output" / "pruning.png"


def main() -> None:
    """Run the demo."""
    # With several threads, times depend on what else the machine is doing.
    torch.set_num_threads(1)
    progress("Loading EfficientNet-Lite0 and the photographs ...")
    model, photos = load_model(), load_photos()
    batch = as_batch(photos)
    with torch.no_grad():
        original = model(batch)

    progress("Listing the operators ...")
    show_operators(model, batch)

    progress("Pruning on the fly ...")
    policies = {
        "Every convolution pruned": [
            pruned_run(model, batch, PruneConvolutions(sparsity)) for sparsity in SPARSITIES
        ],
        "Every convolution pruned, except the depthwise ones": [
            pruned_run(model, batch, PruneConvolutions(sparsity, depthwise=False))
            for sparsity in SPARSITIES
        ],
    }
    for policy, runs in policies.items():
        show_predictions(policy, photos, runs)
    write_contact_sheet(PICTURE, photos, policies)

    progress("Counting, forward and backward ...")
    counter, same_gradients = count_training_step(model, batch, photos)

    progress("Measuring the cost ...")
    show_cost(model, batch[:1])

    with torch.no_grad():
        facts = {
            "Output after all of this, bit for bit the original": torch.equal(
                model(batch), original
            ),
            "Pruned output, bit for bit that of torch.nn.utils.prune on a copy": torch.equal(
                run_with(model, batch, PruneConvolutions(0.2)), prune_a_copy(model, 0.2)(batch)
            ),
            "Gradients with the counter applied, bit for bit the original": same_gradients,
            f"Convolutions counted: {counter.forward} forward, {counter.backward} backward": (
                counter.forward == counter.backward == count_conv_modules(model)
            ),
            "Unpruned predictions are the photographs' classes": all(
                prediction.label == photo.label
                for photo, prediction in zip(photos, predictions(original), strict=True)
            ),
        }
    show_table(
        "Checks",
        ["what", "holds"],
        [[fact, "yes" if holds else "NO"] for fact, holds in facts.items()],
    )
    print(f"Picture: {PICTURE}")
    if not all(facts.values()):
        raise SystemExit("A check failed.")


def run_with(model: torch.nn.Module, batch: torch.Tensor, *tools: amanda.Tool) -> torch.Tensor:
    """Return the model's output with the tools applied."""
    with torch.no_grad(), amanda.apply(*tools):
        output: torch.Tensor = model(batch)
    return output


def show_operators(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Print the operators that the model executed, grouped by type."""
    tool = ListOperators()
    run_with(model, batch, tool)
    by_type: defaultdict[str, list[Operator]] = defaultdict(list)
    for operator in tool.operators:
        by_type[operator.type].append(operator)
    rows = []
    for op_type, group in sorted(by_type.items(), key=lambda item: -len(item[1])):
        last = group[-1]
        counts = [str(len(group)), str(tool.runs[op_type])]
        rows.append([op_type, *counts, last.name, last.source, last.output_shapes])
    # A module that is called twice, here the activation of a block, contains one operator that
    # runs twice.
    show_table(
        f"{len(tool.operators)} operators in {tool.runs.total()} runs, with the last of each type",
        ["operator", "count", "runs", "name", "source", "output shape"],
        rows,
    )


def pruned_run(model: torch.nn.Module, batch: torch.Tensor, tool: PruneConvolutions) -> PrunedRun:
    """Run the model with the tool applied."""
    output = run_with(model, batch, tool)
    return PrunedRun(tool.sparsity, tool.achieved, predictions(output))


def show_predictions(policy: str, photos: list[Photo], runs: list[PrunedRun]) -> None:
    """Print what the model recognized in each photograph at each sparsity."""
    rows = [
        [f"{run.sparsity:.0%}", f"{run.achieved:.1%}", *map(str, run.predictions)] for run in runs
    ]
    columns = ["asked for", "zero weights", *(photo.name for photo in photos)]
    show_table(f"{policy}: top-1 class of each photograph", columns, rows)


def prune_a_copy(model: torch.nn.Module, sparsity: float) -> torch.nn.Module:
    """Return a copy of the model pruned with PyTorch's own utilities, which change its modules."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, torch.nn.Conv2d):
            prune.l1_unstructured(module, "weight", sparsity)  # type: ignore[no-untyped-call]
    return copied


def count_conv_modules(model: torch.nn.Module) -> int:
    """Return the number of convolution modules in the model."""
    return sum(isinstance(module, torch.nn.Conv2d) for module in model.modules())


def count_training_step(
    model: torch.nn.Module, batch: torch.Tensor, photos: list[Photo]
) -> tuple[CountConvolutions, bool]:
    """Count the convolutions of one forward and backward pass.

    Returns the counter, and whether the gradients were the same as without it.
    """
    labels = torch.tensor([photo.label for photo in photos])

    def gradients() -> list[torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(model(batch), labels)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    plain = gradients()
    counter = CountConvolutions()
    with amanda.apply(counter):
        counted = gradients()
    return counter, all(map(torch.equal, plain, counted))


def show_cost(model: torch.nn.Module, photo: torch.Tensor) -> None:
    """Print how long a forward pass over one photograph takes, plain and instrumented."""
    copied = prune_a_copy(model, 0.2)
    # Apply the same instances again and again, so that each analyses only once.
    nothing, counter, pruner = amanda.Tool(), CountConvolutions(), PruneConvolutions(0.2)
    seconds = interleaved_medians(
        {
            "plain": (model, nullcontext),
            "a tool that inserts nothing": (model, lambda: amanda.apply(nothing)),
            "counting the convolutions": (model, lambda: amanda.apply(counter)),
            "pruning the convolutions": (model, lambda: amanda.apply(pruner)),
            "for comparison: torch.nn.utils.prune on a copy": (copied, nullcontext),
        },
        photo,
    )
    rows = [
        [way, f"{1e3 * time:.2f} ms", f"{time / seconds['plain']:.3f}"]
        for way, time in seconds.items()
    ]
    show_table(
        "Cost of one forward run (one photograph, one thread), medians, in turns",
        ["", "time", "ratio to plain"],
        rows,
    )


if __name__ == "__main__":
    main()
