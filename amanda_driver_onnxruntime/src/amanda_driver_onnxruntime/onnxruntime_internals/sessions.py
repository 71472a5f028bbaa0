"""Sessions: the ways to run one, its model and options, and sessions of parts of a model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnxruntime import (
    GraphOptimizationLevel,
    InferenceSession,
    IOBinding,
    OrtValue,
    SessionOptions,
)
from onnxruntime.capi.onnxruntime_inference_collection import Session

from amanda_driver_onnxruntime.onnxruntime_internals.values import parsed
from amanda_driver_onnxruntime.vocabulary import DECLARATIONS

__all__ = [
    "ENTRY_POINTS",
    "LARGE",
    "LARGEST",
    "Part",
    "Settings",
    "UnknownModelError",
    "level_of",
    "model_of",
]

#: The ways to run a session, and what must be noted for one of them: class, method.
ENTRY_POINTS = (
    (IOBinding, "bind_output"),
    (Session, "run"),
    (Session, "run_async"),
    (Session, "run_with_iobinding"),
    (Session, "run_with_ort_values"),
    (Session, "run_with_ortvaluevector"),
)
#: What a session writes to files; its parts must not.
_OF_FILES = {"optimized_model_filepath", "enable_profiling", "profile_file_prefix"}
#: Environment variable: with the value "optimized" tools see what optimisations left.
_GRAPH = "AMANDA_ONNXRUNTIME_GRAPH"
#: Bytes of a model above which its weights stand outside: protobuf has at most 2 GiB.
LARGEST = 2**31 - 2**20
#: Bytes of a weight from which it stands there.
LARGE = 1024
_FOLDER = "session.model_external_initializers_file_folder_path"


class UnknownModelError(Exception):
    """The model of a session cannot be read; the message says which sessions these are."""


def model_of(session: Any) -> tuple[onnx.ModelProto, Settings]:
    """Return the model of a session, without weights in other files, and the session's settings.

    Raises:
        UnknownModelError: It has none.
    """
    path, data, settings = session._model_path, session._model_bytes, Settings(session)
    if path is None and data is None:
        raise UnknownModelError("sessions of model packages")
    is_ort = str(path).endswith(".ort") or (data or b"")[4:8] == b"ORTM"
    if is_ort or settings.text("session.load_model_format").upper() == "ORT":
        raise UnknownModelError("sessions of models in ONNX Runtime's own format (.ort)")
    try:
        if path:
            model = onnx.load_model(path, load_external_data=False)
        else:
            model = onnx.load_model_from_string(data)
    except Exception as error:  # Its file is gone, or has become anything else.
        raise UnknownModelError(f"sessions whose model cannot be read again ({error})") from error
    names = [one.name for one in session.get_inputs()]
    weights = {one.name for one in model.graph.initializer}
    if names != [one.name for one in model.graph.input if one.name not in weights]:
        raise UnknownModelError("sessions whose file has changed since")
    if any(node.op_type == "EPContext" for node in model.graph.node):
        raise UnknownModelError("sessions of models that are compiled for a device (EPContext)")
    if _sees_optimized():
        model = _optimized(session, path or data, settings)
    return model, settings


def _optimized(session: Any, source: Any, settings: Settings) -> onnx.ModelProto:
    """Return the graph that a session runs once it has fused operators."""
    with tempfile.TemporaryDirectory() as made:
        options = settings.options()
        options.graph_optimization_level = session.get_session_options().graph_optimization_level
        options.optimized_model_filepath = os.path.join(made, "model.onnx")
        # It says that the file fits this machine only.
        options.log_severity_level = 3
        InferenceSession(source, options, providers=settings.providers)
        return onnx.load_model(options.optimized_model_filepath)


def level_of(session: Any) -> int:
    """Return how far a session optimises the graph that tools see.

    Returns:
        0 if it does not, 1 for basic optimisations, or more.
    """
    level = session.get_session_options().graph_optimization_level
    return 0 if _sees_optimized() else int(level)


def _sees_optimized() -> bool:
    return os.environ.get(_GRAPH) == "optimized"


class Settings:
    """The options and execution providers of a session, for the parts of its model.

    Attributes:
        providers: The providers, with their options.
        given: The options that the program gave, of which not all can be read; None without any.
        folder: The folder of the files that hold the model's weights; empty if it has none.
    """

    def __init__(self, session: Any) -> None:
        known = session.get_provider_options()
        self.providers = [(name, known.get(name, {})) for name in session.get_providers()]
        self.given: Any = session._sess_options_initial
        path = session._model_path
        self.folder = os.path.dirname(os.path.abspath(path)) if path else self.text(_FOLDER)

    def text(self, key: str) -> str:
        """Return an option that is a text; empty if it is not set."""
        try:
            return "" if self.given is None else str(self.given.get_session_config_entry(key))
        except RuntimeError:  # It is not set.
            return ""

    def options(self) -> SessionOptions:
        """Return new options for a part. Those of the session are not changed."""
        options = SessionOptions()
        for name in dir(options) if self.given is not None else ():
            value = getattr(self.given, name)
            if not (name.startswith("_") or callable(value) or name in _OF_FILES):
                setattr(options, name, value)
        for key in DECLARATIONS.names["options"]:
            if text := self.text(key):
                options.add_session_config_entry(key, text)
        if _sees_optimized():
            options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
        # There are many parts, and their threads must not wait by spinning.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self.folder:
            options.add_session_config_entry(_FOLDER, self.folder)
        return options

    def part(self, model: onnx.ModelProto, outside: Mapping[str, Any]) -> Part:
        """Return the session of a part.

        Args:
            model: The model of the part.
            outside: Values of weights that the model names only.
        """
        options = self.options()
        if outside:
            options.add_external_initializers(list(outside), list(outside.values()))
        data = model.SerializeToString()
        return Part(InferenceSession(data, options, providers=self.providers), outside)


class Part:
    """A part of a model, as a session of its own.

    Attributes:
        inputs: The names of the values that it needs.
        outputs: The names of those that it computes.
        kinds: Output -> its type, if it is a sequence.

    Args:
        session: The session.
        kept: What it needs in memory.
    """

    def __init__(self, session: InferenceSession, kept: Any = None) -> None:
        self._kept = kept
        self.inputs = [one.name for one in session.get_inputs()]
        self.outputs = [one.name for one in session.get_outputs()]
        typed = {one.name: one.type for one in session.get_outputs()}
        self.kinds = {name: parsed(t) for name, t in typed.items() if t.startswith("seq(tensor")}
        self._defaults = [one.name for one in session.get_overridable_initializers()]
        self._run: Any = session._sess

    def run(
        self, values: Mapping[str, Any], run_options: Any, names: Sequence[str] = ()
    ) -> list[Any]:
        """Compute outputs, all by default, from the inputs, which are of types of `ort_value`."""
        feeds, outputs = {name: values[name] for name in self.inputs}, names or self.outputs
        feeds |= {name: values[name] for name in self._defaults if name in values}
        if all(isinstance(value, OrtValue) for value in feeds.values()):
            given = {name: value._ortvalue for name, value in feeds.items()}
            found = self._run.run_with_ort_values(given, outputs, run_options)
            # Iteration over ONNX Runtime's vector ends by an exception of C++, which takes long.
            return [OrtValue(found[place]) for place in range(len(found))]
        # Texts pass only this way.
        return list(self._run.run(outputs, feeds, run_options))
