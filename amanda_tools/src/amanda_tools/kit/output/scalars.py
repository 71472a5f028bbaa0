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


def scalars_of(result: Any) -> dict[str, float]:
    """Return the numbers of a result that matter most, by name.

    These are the ``figures`` among its ``charts``, with the operator of a figure left out, and
    shares in percent; and if it has none, the numbers at the top of its JSON.

    >>> from types import SimpleNamespace
    >>> scalars_of(SimpleNamespace(to_json=lambda: '{"format": "calls/1", "calls": 3}'))
    {'calls': 3.0}
    """
    content = json.loads(result.to_json())
    if not isinstance(content, dict):
        return {}
    figures = [chart for chart in content.get("charts", ()) if chart.get("kind") == "figures"]
    found: dict[str, Any] = {
        item["label"] + (f" ({item['unit']})" if item.get("unit") else ""): _value_of(item)
        for chart in figures
        for item in chart["items"]
    }
    return {
        re.sub(r"[^\w ()./%-]", "_", name): float(value)
        for name, value in (found or content).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _value_of(figure: Mapping[str, Any]) -> Any:
    """Return the value of a figure in the unit that it is given with; a share is one of 1."""
    value = figure["value"]
    is_share = figure.get("unit") == "%" and isinstance(value, (int, float))
    return 100 * value if is_share else value


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
            # MLflow refuses percent signs and brackets in names.
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
