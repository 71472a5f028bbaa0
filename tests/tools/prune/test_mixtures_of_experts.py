"""Pruning of mixtures of experts: all that transformers registers, whatever runs their experts.

`python -m tests.test_mixtures_of_experts` prints what comes out; with `--page` it also writes
docs/tools/mixtures-of-experts.md.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import amanda
from amanda_tools.prune import Prune, PruneResult

from ..mixtures import (
    IMPLEMENTATIONS,
    CannotBuildError,
    architectures,
    build,
    masked,
    output_of,
    prompts,
)

PAGE = Path(__file__).parents[3] / "docs/tools/mixtures-of-experts.md"
INTRODUCTION = """\
# Mixtures of experts

See what `Prune(0.5)` does to each mixture of experts that transformers {version} registers, in a
tiny configuration, with each implementation of the experts.

`tests/tools/prune/test_mixtures_of_experts.py` compares the outputs of four prompts with different
routing, and the gradients of a training step, with a copy whose parameters were masked matrix by
matrix without Amanda.

- *equal*: they are the same. The share is that of the matrices that the prompts read.
- *skipped*: the model could not be built in a small configuration, or does not run. The text says
  why, in its first 120 letters.

This page is made by `python -m tests.test_mixtures_of_experts --page`.
"""
SPARSITY = 0.5
#: Two for each kind of experts: linear layers gated and not, with biases, shared, transposed.
SAMPLE = ("mixtral", "gpt_oss")
MORE = ("qwen3_moe", "deepseek_v3", "granitemoe", "dbrx", "olmoe", "switch_transformers", "jamba")


@dataclasses.dataclass
class Outcome:
    """The outcome of pruning one model.

    Attributes:
        wrong: What differs from the reference; empty if nothing does.
        parameters: Elements of the matrices that products read.
        reached: How many of them the tool has pruned.
        result: What the tool says.
    """

    wrong: list[str]
    parameters: int
    reached: int
    result: PruneResult


def outcome_of(name: str, implementation: str) -> Outcome:
    """Prune a tiny model of an architecture, and compare it with its reference."""
    model = build(name, implementation)
    try:
        reference = masked(model, SPARSITY)
    except Exception as error:
        raise CannotBuildError(f"does not run: {type(error).__name__}: {error}"[:120]) from error
    tool, wrong = Prune(SPARSITY, embeddings=True), []
    feeds = prompts(model)
    with torch.no_grad():
        expected = [output_of(reference.model, feed) for feed in feeds]
    with amanda.apply(tool):
        for number, feed in enumerate(feeds):
            with torch.no_grad():
                if not torch.equal(output_of(model, feed), expected[number]):
                    wrong.append(f"output of prompt {number}")
        output_of(model, feeds[1]).float().square().mean().backward()  # type: ignore[no-untyped-call]
    output_of(reference.model, feeds[1]).float().square().mean().backward()  # type: ignore[no-untyped-call]
    expected_parameters = dict(reference.model.named_parameters())
    for path, parameter in model.named_parameters():
        gradient = expected_parameters[path].grad
        if gradient is not None and path in reference.masks:
            gradient = gradient * reference.masks[path]
        own = parameter.grad
        if own is None or gradient is None:
            same = own is gradient
        else:
            same = torch.allclose(own, gradient, rtol=1e-4, atol=1e-6)
        if not same:
            wrong.append(f"gradient of {path}")
    found = tool.result()
    pruned = {weight.name for weight in found.weights}
    wrong += [f"{path} is not pruned" for path in reference.masks.keys() - pruned]
    wrong += [f"{path} is pruned" for path in pruned - reference.masks.keys()]
    named = {weight.name for weight in found.unreached} | pruned
    # Biases of experts are read one by one, as vectors, where experts run one by one.
    stacked = "_bias" if implementation == "eager" else "none"
    matrices = {
        path for path, p in model.named_parameters() if p.ndim > 1 and not path.endswith(stacked)
    }
    wrong += [f"{path} is not named" for path in matrices - named]
    reached = sum(mask.numel() for path, mask in reference.masks.items() if path in pruned)
    return Outcome(wrong, sum(m.numel() for m in reference.masks.values()), reached, found)


def check(name: str, implementation: str) -> None:
    try:
        outcome = outcome_of(name, implementation)
    except CannotBuildError as error:
        pytest.skip(f"{name}, {implementation}: {error}")
    assert outcome.wrong == []
    assert outcome.reached >= 0.99 * outcome.parameters


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_are_pruned_however_they_are_run(implementation: str) -> None:
    outcome = outcome_of(SAMPLE[0], implementation)
    assert outcome.wrong == []
    assert outcome.reached == outcome.parameters > 40_000
    # In a loop, experts are read one by one: what no prompt hit is listed as that.
    read = {weight.name: weight.read for weight in outcome.result.weights}
    left = {weight.name: weight.elements for weight in outcome.result.unreached}
    for weight in outcome.result.weights:
        assert read[weight.name] + left.get(weight.name, 0) == weight.elements


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [*SAMPLE[1:], *MORE])
def test_mixtures_of_experts_are_pruned(name: str, implementation: str) -> None:
    check(name, implementation)


@pytest.mark.exhaustive
# Some models make their masks by vmap.
@pytest.mark.filterwarnings("ignore:Operators inside torch.func transforms")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_registered_mixture_of_experts_is_pruned(implementation: str) -> None:
    rows = [row_of(name, implementation) for name in architectures()]
    for row in rows:
        print(*row, sep=" | ")
    assert [row for row in rows if row[2].startswith("wrong")] == []
    assert len([row for row in rows if row[2] == "equal"]) >= (
        75 if implementation == "eager" else 70
    )


def row_of(name: str, implementation: str) -> tuple[str, str, str, str]:
    """Return a row of the table: what came out for one architecture."""
    try:
        outcome = outcome_of(name, implementation)
    except CannotBuildError as error:
        return name, implementation, f"skipped: {error}", ""
    except Exception as error:
        return name, implementation, f"wrong: {type(error).__name__}: {error}"[:200], ""
    share = f"{outcome.reached / max(outcome.parameters, 1):.1%}"
    wrong = f"wrong: {'; '.join(outcome.wrong[:4])}"
    return name, implementation, wrong if outcome.wrong else "equal", share


def page_of(rows: list[tuple[str, str, str, str]]) -> str:
    """Return the page of the documentation, from a row for each model and implementation."""
    cells: dict[str, dict[str, str]] = {}
    for name, implementation, outcome, share in rows:
        cells.setdefault(name, {})[implementation] = f"{outcome}, {share}" if share else outcome
    lines = [INTRODUCTION.format(version=transformers.__version__)]
    lines.append(f"| model | {' | '.join(IMPLEMENTATIONS)} |\n|---|---|---|---|")
    for name, found in cells.items():
        shown = [found.get(way, "").replace("|", "/") for way in IMPLEMENTATIONS]
        same = len(set(shown)) == 1 and shown[0].startswith("skipped")
        lines.append(f"| {name} | {' | '.join([shown[0], 'same', 'same'] if same else shown)} |")
    equal = [way for _, way, outcome, _ in rows if outcome == "equal"]
    counts = [str(equal.count(way)) for way in IMPLEMENTATIONS]
    lines.append(f"| equal | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    chosen: Any = [name for name in sys.argv[1:] if name != "--page"] or architectures()
    found = []
    for each in chosen:
        for way in IMPLEMENTATIONS:
            found.append(row_of(each, way))
            print(*found[-1], sep=" | ", flush=True)
    if "--page" in sys.argv:
        PAGE.write_text(page_of(found))
