"""The notebooks of `examples/notebooks` run, and keep the outputs that they then have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.one_interceptor

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
#: Their outputs contain a time, or the name of a cell.
VARYING = ("profile_a_bert", "where_two_runs_part")


def texts(notebook: Any) -> list[str]:
    """Return what the cells print and show, without messages on stderr."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [
        output for cell in cells for output in cell.outputs if output.get("name") != "stderr"
    ]
    return [output.get("text") or output["data"]["text/plain"] for output in outputs]


def read(path: Path) -> Any:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    return nbformat.read(path, as_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_name_no_machine(path: Path) -> None:
    notebook = read(path)
    assert len(NOTEBOOKS) == 5
    assert texts(notebook)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert [out for out in outputs if out.get("name") == "stderr"] == []
    assert "/tmp/" not in str(outputs)
    assert "/home/" not in str(outputs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    notebook, kept = read(path), texts(read(path))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    found = texts(notebook)
    if path.stem in VARYING:
        assert len(found) == len(kept)
    else:
        assert found == kept
