"""The page of short tools: `python -m maintenance.site.gallery`.

Each tool is a file of `examples/gallery`. The page shows it, a program that uses it, and what that
program prints here; a test compares.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "PAGE", "USES", "page", "tools"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples/gallery"
PAGE = ROOT / "docs/gallery.md"
#: What the programs of the page share.
MODEL = """\
import torch
from torch.nn import functional as F

import amanda


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        x = x + (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        return self.second(F.relu(self.first(x)))


torch.manual_seed(0)
model, x = Net(), torch.randn(2, 6, 8)
plain = model(x).detach()


def rounded(found):
    return {name: round(float(value), 3) for name, value in found.items()}
"""
_TRAIN = "    model(x).square().sum().backward()\n"
_CHANGE = '    print("largest change:", round((model(x) - plain).abs().max().item(), 3))\n'
#: File of a tool -> how a program uses it. The order is that of the page.
USES = {
    "gradient_norms": f"""\
with amanda.apply(tool := GradientNorms()):
{_TRAIN}print(rounded(tool.norms))
""",
    "histograms": """\
with amanda.apply(tool := Histograms()):
    model(x)
for name, counts in tool.counts.items():
    print(f"{name:14}", *counts)
""",
    "dead_relus": """\
with amanda.apply(tool := DeadReLUs()):
    model(x[:, :1])
    print(tool.count(), "of 16 units")
    model(x)
    print(tool.count(), "of 16 units")
""",
    "attention_entropy": """\
with amanda.apply(tool := AttentionEntropy()):
    model(x), model(10 * x)
print([round(entropy, 3) for entropy in tool.entropies["softmax"]])
""",
    "kv_magnitude": """\
q, k, v = (layer(x)[:, None] for layer in (model.query, model.key, model.value))
with amanda.apply(tool := KVMagnitude()):
    F.scaled_dot_product_attention(q, k, v)
for name, sizes in (("keys", tool.keys), ("values", tool.values)):
    print(f"{name:6}", *(f"{size:.3f}" for size in sizes["scaled_dot_product_attention"]))
""",
    "saliency": f"""\
with amanda.apply(tool := Saliency()):
{_TRAIN}print(*(f"{{value:.2f}}" for value in tool.salient["relu"]))
""",
    "nan_trap": """\
with torch.no_grad():
    model.first.weight[3, 2] = float("inf")
try:
    with amanda.apply(NaNTrap()):
        model(x)
except FloatingPointError as error:
    print(str(error).partition(" at ")[0])
with torch.no_grad():
    model.first.weight[3, 2] = 0
    plain = model(x)
""",
    "timing": """\
with amanda.apply(tool := Timing()):
    model(x), model(x)
print({name: calls for name, calls in tool.calls.items() if tool.seconds[name] > 0})
""",
    "parameters_touched": """\
with amanda.apply(tool := ParametersTouched()):
    model.first(x)
print(tool.elements)
with amanda.apply(tool := ParametersTouched()):
    model(x)
print(tool.total(), "of", sum(parameter.numel() for parameter in model.parameters()))
""",
    "activation_cache": """\
import numpy as np

with amanda.apply(tool := ActivationCache("activations")):
    model(x), model(-x)
for file in tool.files:
    print(file.name, np.load(file).shape)
""",
    "low_rank_update": f"""\
with amanda.apply(LowRankUpdate(rank=2)):
{_CHANGE}""",
    "weight_noise": f"""\
with amanda.apply(WeightNoise(share=0.01)):
{_CHANGE}{_CHANGE}""",
    "fp8_inputs": f"""\
with amanda.apply(FP8Inputs()):
{_CHANGE}""",
    "skip": f"""\
with amanda.apply(tool := Skip("relu")):
{_CHANGE}print("skipped:", tool.skipped)
""",
    "freeze": f"""\
model.zero_grad()
with amanda.apply(tool := Freeze(layers=3)):
{_TRAIN}print(rounded({{name: layer.weight.grad.norm() for name, layer in model.named_children()}}))
print("frozen:", tool.frozen)
""",
}
HEAD = """\
# Gallery: fifteen tools of under forty lines

Start from one of these. Each is a file of [examples/gallery](../examples/gallery), and names no
framework: the tests run it on PyTorch, TensorFlow and ONNX Runtime, and compare with NumPy. Save it
beside your program. The programs on this page share a model and run in this page's order. Where a
[shipped tool](tools/README.md) does more, it is named.

This page is made by `python -m maintenance.site.gallery`; do not edit it.
"""


def tools() -> list[Path]:
    """Return the files of the tools, in the order of the page."""
    return [FOLDER / f"{name}.py" for name in USES]


def page() -> str:
    """Return the page; what it shows is run for this, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        names: dict[str, Any] = {"__name__": "gallery"}
        exec(MODEL, names)
        parts = [HEAD, f"```python\n{MODEL}```\n"]
        parts += [_part(number, file, names) for number, file in enumerate(tools(), 1)]
    return "\n".join(parts)


def _part(number: int, file: Path, names: dict[str, Any]) -> str:
    title, text, source = _split(file.read_text("utf-8"))
    tool = re.findall(r"^class (\w+)", source, re.MULTILINE)[-1]
    use = f"from {file.stem} import {tool}\n\n{USES[file.stem]}"
    Path(file.name).write_text(file.read_text("utf-8"), "utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(use, f"the use of {file.name}", "exec"), names)
    return (
        f"## {number}. {title}\n\n{text}\n\n`{file.name}`:\n```python\n{source}```\n\n"
        f"```python\n{use}```\n\n```text\n{printed.getvalue()}```\n"
    )


def _split(text: str) -> tuple[str, str, str]:
    """Return the title of a tool, what its docstring says further, and the rest of the file."""
    docstring, _, source = text.removeprefix('"""').partition('"""\n')
    title, _, further = docstring.partition("\n\n")
    return " ".join(title.split()).rstrip("."), further.strip(), source.lstrip("\n")


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Run in a folder whose modules can be imported, and forget them afterwards."""
    before, here = set(sys.modules), Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(here)
        for name in set(sys.modules) - before:
            if name in USES:
                del sys.modules[name]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
