"""Mistakes planted in ports of networks, and the layer that `amanda diff` names.

`python -m maintenance.sweeps.ports --results FILE --page maintenance/sweeps/ports.md` runs all of
them, each port in a process of its own, and writes what was found and a page. Equal ports must be
equal.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import amanda
from amanda_tools.diff import DiffResult, compare
from amanda_tools.dump import Dump, Dumped

from .port_programs.planted import At, Plant

__all__ = ["PORTS", "Found", "dumped", "layer_of", "run"]

#: Module of `port_programs` -> what is ported to what.
PORTS = {
    "mlp": "perceptron with layer normalisation → Keras, eager",
    "cnn": "residual network → Keras' `predict`",
    "recurrent": "LSTM and GRU → Keras, eager",
    "bert": "transformers' BERT → Keras' MultiHeadAttention, eager",
    "inverted": "EfficientNet blocks → `tf.function`",
    "unet": "U-Net → ONNX graph by hand",
    "t5": "transformers' T5 encoder → ONNX graph of small operators",
    "vit": "transformers' ViT → another class, exported to ONNX",
    "llama": "transformers' Llama → PyTorch by hand",
    "mixture": "transformers' Mixtral → PyTorch by hand",
}
#: Kind of a mistake -> how the sentence about it begins. The values do not show the others.
KINDS = {
    "epsilon": "epsilon",
    "tanh gelu": "activation",
    "padding": "padding",
    "transposed kernel": "kernel",
    "rotary": "rotary",
    "scale": "scale",
    "bias": "bias",
    "dtype": "dtype",
    "mask": "mask",
    "groups": "heads",
}


@dataclass
class Found:
    """What was said of one mistake.

    Attributes:
        port: Name of the port.
        kind: The mistake; an empty text for none.
        layer: Where it was planted.
        named: Layer that was named; None if no difference was.
        right: Whether that is the right layer; of an equal port, whether none was named.
        likely: What was said of the kind.
        conclusion: All that was said.
    """

    port: str
    kind: str
    layer: str
    named: str | None
    right: bool
    likely: str | None
    conclusion: str

    @property
    def is_kind_right(self) -> bool | None:
        """Return True if the right kind of mistake is named; None if none is."""
        if self.likely is None:
            return None
        return self.likely.partition(":")[0] == KINDS.get(self.kind)


def layer_of(found: DiffResult) -> str | None:
    """Return the module of the original in which the conclusion says that the runs part."""
    if found.first is None:
        return None
    return found.suspects[0].module if found.suspects else found.first.a.module


def dumped(program: Callable[[], object]) -> Dumped:
    """Run a program and return what it computed."""
    tool = Dump(values=["inputs", "weights", "outputs"])
    with amanda.apply(tool):
        program()
    return tool.result().open()


def run(name: str, plants: Sequence[Plant] | None = None) -> list[Found]:
    """Compare an equal port and ports with mistakes with the original.

    Args:
        name: Name of the port.
        plants: The mistakes; None for all that the port has.
    """
    module: Any = importlib.import_module(f"maintenance.sweeps.port_programs.{name}")
    original = dumped(module.ours())
    found = []
    for plant in (None, *(module.PLANTS if plants is None else plants)):
        result = compare(original, dumped(module.port(At(plant))))
        named = layer_of(result)
        if plant is None:
            right, kind, layer = named is None, "", ""
        else:
            right = named in (plant.layer, *plant.also)
            kind, layer = plant.kind, plant.layer
        text = result.conclusion(3)
        found.append(Found(name, kind, layer, named, right, result.likely, text))
    return found


def _page(found: Sequence[Found]) -> str:
    planted = [one for one in found if one.kind]
    equal = [one for one in found if not one.kind]
    right = sum(one.right for one in planted)
    kinds = [one.is_kind_right for one in planted]
    lines = [
        "# Planted mistakes in ports that `amanda diff` finds",
        "",
        "Written by `python -m maintenance.sweeps.ports`. Each network is ported as a user would, "
        "with its weights copied by a table. Both are recorded with "
        '`-t "dump:values=[inputs,weights,outputs]"` and compared without options. The layer that '
        "is named is that of the first operator *only in A, just before* the first difference, and "
        "else that of the first difference.",
        "",
        f"The right layer was named for {right} of {len(planted)} mistakes. "
        f"{sum(not one.right for one in equal)} of {len(equal)} equal ports were said to differ. "
        f"The kind of mistake was named for {kinds.count(True)}, another kind for "
        f"{kinds.count(False)}, and none for {kinds.count(None)}.",
        "",
        "| port | mistake | planted in | named layer | likely |",
        "|---|---|---|---|---|",
    ]
    for one in planted:
        mark = "" if one.right else "**wrong** "
        said = {True: "", False: "**wrong** ", None: ""}[one.is_kind_right]
        lines.append(
            f"| {PORTS[one.port]} | {one.kind} | `{one.layer}` | {mark}`{one.named}` "
            f"| {said}{one.likely or ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the sweep; return 1 if a layer is wrong or an equal port is said to differ."""
    parser = argparse.ArgumentParser(prog="python -m maintenance.sweeps.ports")
    parser.add_argument("--port", choices=PORTS, help="only this one, in this process")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.port:
        print(json.dumps([asdict(one) for one in run(options.port)]))
        return 0
    found = []
    for name in PORTS:
        command = [sys.executable, "-m", "maintenance.sweeps.ports", "--port", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
        found += [Found(**one) for one in json.loads(done.stdout.splitlines()[-1])]
    for one in found:
        if not one.right:
            print(f"{one.port}: {one.kind} in {one.layer}: {one.conclusion}")
    if options.results:
        options.results.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if options.page:
        options.page.write_text(_page(found))
    return int(not all(one.right for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
