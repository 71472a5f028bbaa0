"""Scalars of results, for TensorBoard, MLflow and Weights & Biases.

Owns which numbers of a result are scalars, and the one adapter to what logs them. The libraries are
imported only when scalars are logged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from amanda_core.errors import ConfigError
from amanda_tools.kit.output.extras import require

__all__ = ["ScalarLog", "scalars_of", "write_scalars"]

_LOGS = ("tensorboard:FOLDER", "mlflow", "wandb")


#: Unit of a figure -> what stands for it in a name, and the value in what it stands for.
_UNITS = {
    "": ("", 1.0),
    "%": ("percent", 100.0),  # The figure is a share of 1.
    "ns": ("ms", 1e-6),
    "s": ("ms", 1e3),
    "B": ("bytes", 1.0),
}


def scalars_of(result: Any) -> dict[str, float]:
    """Return the numbers of a result that matter most, by name, such as ``step_median_ms``.

    These are the ``figures`` among its ``charts``, with the operator of a figure left out, times in
    milliseconds and shares in percent; and if it has none, the numbers at the top of its JSON.

    >>> from types import SimpleNamespace
    >>> scalars_of(SimpleNamespace(to_json=lambda: '{"format": "calls/1", "calls": 3}'))
    {'calls': 3.0}
    """
    content = json.loads(result.to_json())
    if not isinstance(content, dict):
        return {}
    charts = [chart for chart in content.get("charts", ()) if chart.get("kind") == "figures"]
    figures = [_scalar_of(item) for chart in charts for item in chart["items"]]
    numbers = figures or [(_slug(name), value, 1.0) for name, value in content.items()]
    return {
        name: value * scale
        for name, value, scale in numbers
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _scalar_of(figure: Mapping[str, Any]) -> tuple[str, Any, float]:
    """Return the name of a figure, its value, and by what that is multiplied."""
    unit, scale = _UNITS.get(figure.get("unit") or "", (figure.get("unit"), 1.0))
    name = _slug(re.sub(r"^(a|an|the) ", "", figure["label"]))
    unit = _slug(unit or "")
    if unit and unit not in name.split("_"):
        name += f"_{unit}"
    return name, figure["value"], scale


def _slug(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_").lower()


class ScalarLog:
    """Logs scalars: to TensorBoard, MLflow or Weights & Biases.

    Args:
        target: ``tensorboard:FOLDER``, ``mlflow`` or ``wandb``. The last two log to the run that is
            active, or start one and end it; it is offline if the library is configured so.

    Raises:
        ConfigError: The target is none of these.
        MissingExtraError: Its library is not installed.

    Example::

        log = ScalarLog("tensorboard:runs/first")
        log.log(scalars_of(tool.result()), step=1)
        log.close()
    """

    def __init__(self, target: str) -> None:
        kind, _, folder = target.partition(":")
        self._run: Any = None
        self._owned = False
        if kind == "tensorboard" and folder:
            self._run = require("tensorboard.summary", "tensorboard").Writer(folder)
        elif target == "mlflow":
            self._run = require("mlflow", "mlflow")
            self._owned = self._run.active_run() is None
            if self._owned:
                self._run.start_run()
        elif target == "wandb":
            wandb = require("wandb", "wandb")
            self._owned = wandb.run is None
            self._run = wandb.init() if self._owned else wandb.run
        else:
            fix = f"Use one of {', '.join(_LOGS)}"
            raise ConfigError(f"Scalars cannot be logged to {target!r}", fix=fix)
        self._kind = kind

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log scalars at a step, such as the number of an epoch."""
        if not scalars:
            return
        if self._kind == "tensorboard":
            for name, value in scalars.items():
                self._run.add_scalar(name, value, step)
            self._run.flush()
        elif self._kind == "mlflow":
            # MLflow refuses percent signs and brackets, which other names may have.
            names = {re.sub(r"[^\w ./-]", "", name).strip(): name for name in scalars}
            self._run.log_metrics({own: scalars[name] for own, name in names.items()}, step=step)
        else:
            # A step of its own, because the program's steps must not go back.
            self._run.log({**scalars, "amanda/step": step})

    def close(self) -> None:
        """End what was started for these scalars."""
        if self._kind == "tensorboard":
            self._run.close()
        elif self._owned:
            (self._run.end_run if self._kind == "mlflow" else self._run.finish)()


def write_scalars(folder: Path, rows: Iterable[tuple[str, int, float]]) -> None:
    """Write an event file for TensorBoard.

    Args:
        folder: Folder of the run.
        rows: ``(tag, step, value)`` for each scalar.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """
    log = ScalarLog(f"tensorboard:{folder}")
    for tag, step, value in rows:
        log.log({tag: value}, step)
    log.close()
