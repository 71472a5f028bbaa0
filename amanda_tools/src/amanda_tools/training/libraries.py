"""`callback`: the callback of each library that trains models.

The libraries are imported when a callback for them is made. Each class only translates the names of
a library's events; what they do is in `run`.
"""

# mypy: disable-error-code="misc"
# The libraries' classes are known only when they are imported.

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from amanda_core.engine.tool import Tool
from amanda_core.errors import ConfigError
from amanda_tools.kit.output.extras import require
from amanda_tools.training.run import ClosingCallback, TrainingRun

__all__ = ["callback"]

Library = Literal["keras", "lightning", "transformers"]


def callback(
    library: Library,
    *tools: Tool | str,
    scalars: str | None = None,
    every: int | None = None,
    show: bool = True,
) -> Any:
    """Return a callback that applies tools while a library trains a model.

    Keras and transformers do not say if an exception leaves a training. Use the callback in a
    ``with`` statement around the training, so that the tools are removed then, too.

    Args:
        library: ``keras``, ``lightning`` or ``transformers``.
        *tools: Tools, or their names as on the command line, such as ``latency:warmup=2``.
        scalars: Where to log the numbers of the results: ``tensorboard:FOLDER``, ``mlflow`` or
            ``wandb``; None for nowhere.
        every: Log them after every so many steps; None for the end of each epoch.
        show: Print the results when a training ends.

    Raises:
        ConfigError: The library is none of these, or a tool's name or the target is unknown.
        MissingExtraError: The library, or what logs scalars, is not installed.
    """
    if library not in _LIBRARIES:
        fix = f"Use one of {', '.join(_LIBRARIES)}"
        raise ConfigError(f"There is no callback for {library!r}", where="amanda.callback", fix=fix)
    return _LIBRARIES[library](TrainingRun(tools, scalars, every, show))


def _keras(run: TrainingRun) -> Any:
    base: Any = require("keras", "keras").callbacks.Callback

    class KerasCallback(ClosingCallback, base):
        """Callback for ``fit``."""

        def __init__(self) -> None:
            super().__init__()
            self.run = run
            self._step = self._before = 0

        def on_train_begin(self, logs: Any = None) -> None:
            # Read once, without tools. On JAX the variable is behind during an epoch.
            iterations = getattr(getattr(self.model, "optimizer", None), "iterations", 0)
            self._step = self._before = int(iterations)
            run.begin(self._step)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # Several batches may run in one call.
            self._step = self._before + batch + 1
            run.end_step(self._step)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self._before = self._step
            run.end_epoch()

        def on_train_end(self, logs: Any = None) -> None:
            run.close()

    return KerasCallback()


def _lightning(run: TrainingRun) -> Any:
    # Both distributions of the library have classes of their own.
    old = "lightning" not in sys.modules and "pytorch_lightning" in sys.modules
    library = require("pytorch_lightning" if old else "lightning.pytorch", "lightning")
    base: Any = library.Callback

    class LightningCallback(ClosingCallback, base):
        """Callback for a ``Trainer``."""

        def __init__(self) -> None:
            super().__init__()
            self.run = run

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            run.begin(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *event: Any, **rest: Any) -> None:
            run.end_step(trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            run.end_epoch()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            run.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            run.close()

    return LightningCallback()


def _transformers(run: TrainingRun) -> Any:
    base: Any = require("transformers", "transformers").TrainerCallback

    class TrainerCallback(ClosingCallback, base):
        """Callback for a ``Trainer``."""

        def __init__(self) -> None:
            super().__init__()
            self.run = run

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            run.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            run.end_step(state.global_step)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            run.end_epoch()

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            run.close()

    return TrainerCallback()


_LIBRARIES: dict[str, Callable[[TrainingRun], Any]] = {
    "keras": _keras,
    "lightning": _lightning,
    "transformers": _transformers,
}
