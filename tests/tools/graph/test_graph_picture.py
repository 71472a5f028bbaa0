"""The first view of a graph: the picture in a notebook, and the tree of the page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import amanda
from amanda_tools import graph
from amanda_tools.graph import Graph, GraphResult, GraphTracing, picture
from amanda_tools.graph.html import packed

pytestmark = pytest.mark.one_interceptor

SVG = "{http://www.w3.org/2000/svg}"
PAGE = Path(graph.__file__).parent / "page"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layer = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layer:
            x = layer(x)
        return x


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert, self.head = Encoder(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.bert(x).tanh())
        return logits


def traced() -> GraphResult:
    """Return the graph of a training script with much around its model."""
    model: Any = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    tool = GraphTracing(everything=True)
    with amanda.apply(tool):
        x = torch.ones(3, 4)
        x = eval("x" + " + 1" * 45)  # Longer than a list of the page, which divides such ones.
        loss = model(x).log_softmax(1).neg().mean().square().sum()
        loss.backward()
        total = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / (total + 1))
        optimizer.step()
    return tool.result()


def test_a_picture_shows_modules_and_folds_what_surrounds_them() -> None:
    result = traced()
    boxes = picture.boxes_of(result.graph)
    names = [box.name for box in boxes]
    assert names.count("(optimizer)") == 1
    assert {"bert.embed", "bert.layer", "head"} <= set(names)
    assert "bert.layer.0.0" not in names  # That level has too many boxes.
    # Parameters by the modules of PyTorch itself.
    model = Classifier()
    sizes = {box.name: box.parameters for box in boxes if box.parameters}
    assert sizes == {
        name: sum(p.numel() for p in model.get_submodule(name).parameters())
        for name in ("bert.embed", "bert.layer", "head")
    }
    before = boxes[names.index("(program)")]
    assert len(before.ops) == 46  # ones, and the additions
    embed, layers = boxes[names.index("bert.embed")], boxes[names.index("bert.layer")]
    assert (before.row, embed.row, layers.row) == (0, 1, 2)
    assert layers.before == {names.index("bert.embed")}


def test_the_picture_is_in_the_output_of_a_notebook() -> None:
    drawn = traced()._repr_html_()
    svg = drawn[drawn.index("<svg") : drawn.index("</svg>") + 6]
    root = ElementTree.fromstring(svg)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "bert.layer" in texts
    assert "60 operators, 2.160 k parameters" in texts  # Thirty times 8 by 8 and 8.
    assert "<script" not in drawn
    assert "<table" in drawn
    assert picture.draw(Graph("none")) == ""
    assert "<svg" not in GraphResult([])._repr_html_()


def test_names_of_modules_are_only_shown() -> None:
    found = Graph("x")
    found.add(graph.Op(1, "a", "add", "add", "<b>", None, "x", 0, outputs=[]))
    (root,) = [ElementTree.fromstring(picture.draw(found))]
    assert [t.text for t in root.iter(f"{SVG}title")] == ["<b>"]


@pytest.fixture(scope="module")
def tree() -> Any:
    """Return the boxes of the page's tree, by the page's own scripts in Node.js."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    base = Path(graph.__file__).parents[1] / "kit/page/base.js"
    quantity = base.read_text()
    start = quantity.index("  const PREFIXES")
    end = quantity.index("\n  };", quantity.index("const quantity")) + 5
    names = ("data", "tree", "fold", "measures")
    scripts = "\n".join((PAGE / f"{name}.js").read_text() for name in names)
    program = f"""
      {scripts}
      {quantity[start:end]}
      globalThis.amanda = {{quantity}};
      const lib = globalThis.amandaGraph;
      const graph = lib.unpacked(JSON.parse(require("fs").readFileSync(0, "utf8")));
      const tree = lib.treeOf(graph), fold = new lib.Fold(tree);
      fold.begin();
      const parameters = lib.parametersText(graph, tree);
      console.log(JSON.stringify(fold.visible().map((box) =>
        [box.id, box.kind, fold.isUnfolded(box), parameters(box)])));
    """
    done = subprocess.run(
        [node, "-e", program],
        input=json.dumps(packed(traced().graph)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_first_view_of_the_page_has_the_modules_by_name(tree: Any) -> None:
    boxes = {name: (kind, unfolded, parameters) for name, kind, unfolded, parameters in tree}
    assert boxes["bert/"][:2] == ("module", True)
    assert boxes["head/"][0] == "module"
    assert boxes["bert/layer/"][:2] == ("stack", False)
    around = [name for name, (kind, *_) in boxes.items() if kind == "surrounding"]
    assert len(around) == 2  # What comes before the model, and what comes after it.
    assert boxes["(optimizer)/"][:2] == ("zone", False)
    assert not any(boxes[name][1] for name in around)
    assert not any(kind == "group" for kind, *_ in boxes.values())


def test_boxes_have_their_parameters_and_their_size(tree: Any) -> None:
    found = {name: parameters for name, *_, parameters in tree}
    model = Classifier()
    for path in ("bert", "bert.embed", "bert.layer", "head"):
        count = sum(p.numel() for p in model.get_submodule(path).parameters())
        size = f"{4 * count} B" if count < 250 else f"{4 * count / 1000:g} kB"
        number = count if count < 1000 else f"{count / 1000:g} k"
        assert found[f"{path.replace('.', '/')}/"] == f"{number} params, {size}"
    assert found["(optimizer)/"] == ""
