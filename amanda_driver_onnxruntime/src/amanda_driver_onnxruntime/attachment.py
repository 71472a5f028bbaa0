"""`OrtAttachment`: attaches one session of tools to ONNX Runtime.

Owns what happens at each way to run a session, and which sessions run without tools.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import onnx
from onnxruntime import InferenceSession

from amanda_core.driver_kit import Session
from amanda_core.interface import CoverageGap, UnsupportedError
from amanda_driver_onnxruntime.execution.parts import Parts
from amanda_driver_onnxruntime.execution.program import Program
from amanda_driver_onnxruntime.execution.weaving import NotWovenError
from amanda_driver_onnxruntime.facts import FACTS
from amanda_driver_onnxruntime.graphs import Model
from amanda_driver_onnxruntime.identity import Finder, Names
from amanda_driver_onnxruntime.interception import Interception
from amanda_driver_onnxruntime.onnxruntime_internals.bindings import Binding, append
from amanda_driver_onnxruntime.onnxruntime_internals.sessions import (
    Part,
    UnknownModelError,
    level_of,
    model_of,
)
from amanda_driver_onnxruntime.onnxruntime_internals.values import (
    OrtValue,
    array_for,
    fits,
    listed,
    ort_value,
)
from amanda_driver_onnxruntime.vocabulary import DECLARATIONS

__all__ = ["OrtAttachment"]

#: Bindings of which not all can be read.
_UNKNOWN = "bindings by addresses, of outputs before apply, or in ONNX Runtime before 1.30"
#: The first level of optimisation, ORT_ENABLE_BASIC.
_BASIC = 1
_NEWER = ": convert the model to version 9 or later of ONNX's operators, by onnx.version_converter"


class _Models:
    """The models of sessions, for all threads under the same tools."""

    def __init__(self) -> None:
        self.names = Names()
        #: Binding -> name of an output -> the device that it is bound to.
        self.devices: weakref.WeakKeyDictionary[Any, dict[str, tuple[str, int]]] = (
            weakref.WeakKeyDictionary()
        )
        self.parts: weakref.WeakKeyDictionary[Any, Parts | str] = weakref.WeakKeyDictionary()

    def parts_of(self, session: Any) -> Parts | str:
        """Return the parts of a session's model, or why it has none."""
        found = self.parts.get(session)
        if found is None:
            try:
                model, settings = model_of(session)
                found = Parts(Model(model, settings.folder), settings)
            except UnknownModelError as error:
                found = str(error)
            self.parts[session] = found
        return found


class OrtAttachment:
    """Instruments the operators of one thread."""

    facts = FACTS

    def __init__(self, session: Session) -> None:
        self.session = session
        self._models = session.shared("onnxruntime.models", _Models)
        self._finder = session.persistent("onnxruntime.parameters", Finder)
        self._programs: weakref.WeakKeyDictionary[Any, Program] = session.persistent(
            "onnxruntime.programs", weakref.WeakKeyDictionary
        )
        #: What ran without tools, and why.
        self._gaps: dict[str, str] = {}
        self._bindings: list[Binding] = []
        session.at_close(self.detach)
        _INTERCEPTION.attach(self)

    def detach(self) -> None:
        """Restore the methods that were found, and the outputs that were bound."""
        _INTERCEPTION.detach(self)
        while self._bindings:
            self._bindings[-1].restore()
            self._bindings.pop()

    def enter_thread(self) -> None:
        """Instrument the calling thread, after another one, which has ended."""
        _INTERCEPTION.move(self)

    def ask(self) -> None:
        """Do nothing: each run in a thread without an attachment calls `join` anyway."""

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what is not instrumented, and why."""
        return [*DECLARATIONS.gaps(), *(CoverageGap(*gap) for gap in self._gaps.items())]

    # Replacements of the methods of sessions.

    def run(
        self,
        original: Callable[..., Any],
        session: Any,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: Any = None,
    ) -> Any:
        """Run a session on arrays."""

        def under_tools(program: Program) -> Any:
            given = _arrays(session, input_feed)
            found = self._run(session, program, given, output_names, run_options)
            return [listed(session, value) for value in found]

        plain = partial(original, session, output_names, input_feed, run_options)
        return self._step(session, input_feed, plain, under_tools)

    def run_with_ort_values(
        self,
        original: Callable[..., Any],
        session: Any,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, Any],
        run_options: Any = None,
    ) -> Any:
        """Run a session on values of ONNX Runtime."""
        given = input_dict_ort_values

        def under_tools(program: Program) -> Any:
            return self._owned(session, program, given, output_names, run_options)

        plain = partial(original, session, output_names, given, run_options)
        return self._step(session, given, plain, under_tools)

    def bind_output(
        self,
        original: Callable[..., None],
        iobinding: Any,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Note where ONNX Runtime allocates an output, which cannot be read back."""
        noted = self._models.devices.setdefault(iobinding, {})
        noted.pop(name, None)
        if buffer_ptr is None:
            noted[name] = device_type, device_id
        original(iobinding, name, device_type, device_id, element_type, shape, buffer_ptr)

    def run_with_iobinding(
        self, original: Callable[..., Any], session: Any, iobinding: Any, run_options: Any = None
    ) -> None:
        """Run a session on values that are bound to its inputs."""
        for kept in [one for one in self._bindings if one.binding is iobinding]:
            kept.restore()
            self._bindings.remove(kept)
        binding = Binding(iobinding, self._models.devices.get(iobinding, {}))
        plain: Callable[[], None] = partial(original, session, iobinding, run_options)

        def under_tools(program: Program) -> None:
            given = binding.inputs()
            if given is None:
                self._pass(program, _UNKNOWN)
                return plain()
            found = self._owned(session, program, given, binding.names, run_options)
            self._bindings.append(binding)
            return binding.give(found)

        self._step(session, None, plain, under_tools)

    def run_with_ortvaluevector(
        self, original: Callable[..., Any], session: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run a session on a vector of values, and append what it returns to another."""

        def under_tools(program: Program) -> None:
            run_options, names, feeds, fetch_names, fetches, *_ = args
            given = {n: OrtValue(feeds[place]) for place, n in enumerate(names)}
            found = self._owned(session, program, given, fetch_names, run_options)
            append(fetches, found)

        self._step(session, None, partial(original, session, *args, **kwargs), under_tools)

    def run_async(
        self, original: Callable[..., Any], session: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a session in a thread of ONNX Runtime without tools, and note that they missed it."""
        program = self._program(session)
        if program is not None and not program.is_idle(self.session):
            self._pass(program, "run_async")
        return original(session, *args, **kwargs)

    def exported(self, session: Any, runs: Sequence[Mapping[str, Any]]) -> onnx.ModelProto:
        """Return the model of a session with the edits of tools.

        Args:
            session: The session.
            runs: The inputs of some runs, in which all operators run.
        """
        program = self._program(session)
        if program is None:
            why = "; ".join(self._gaps)
            raise UnsupportedError(
                f"The model of the session is not known: {why}",
                where="amanda.exported",
                fix="Give the model's file",
            )
        for run in runs:
            given = _arrays(session, run)
            if not _is_right(session, given):
                wanted = ", ".join(f"{one.name}: {one.type}" for one in session.get_inputs())
                raise UnsupportedError(
                    "The example inputs are not those of the model",
                    where="amanda.exported",
                    fix=f"Give them by name, in one dictionary: {wanted}",
                )
            program.run(self.session, given, [one.name for one in session.get_outputs()], None)
        try:
            return program.exported(self.session)
        except NotWovenError as error:
            raise UnsupportedError(
                f"A routine cannot be exported: {error}",
                where=error.where,
                fix=error.fix,
            ) from error

    def _step(
        self,
        session: Any,
        given: Mapping[str, Any] | None,
        plain: Callable[[], Any],
        under_tools: Callable[[Program], Any],
    ) -> Any:
        """Run a session, under tools if any acts in it. This is a step."""
        if not self.session.enabled:
            return plain()
        program = self._program(session)
        if program is None or program.is_idle(self.session):
            result = plain()
        elif given is not None and not _is_right(session, given):
            result = plain()  # ONNX Runtime says best what is wrong with inputs.
        else:
            try:
                result = under_tools(program)
            except UnknownModelError as error:
                self._models.parts[session] = str(error)
                self._programs.pop(session, None)
                self._refuse(str(error))
                result = plain()
        self.session.end_step()
        return result

    def _run(
        self,
        session: Any,
        program: Program,
        given: Mapping[str, Any],
        names: Sequence[str] | None,
        run_options: Any,
    ) -> list[Any]:
        program.parts.check(session, given)
        wanted = names or [one.name for one in session.get_outputs()]
        whole = program.whole(self.session, given)
        if whole is not None:
            return whole.run(_ort_values(given), run_options, wanted)
        if level := level_of(session):
            which = "of BatchNormalization into Conv" if level == _BASIC else "of many kinds"
            self._gaps[f"fusions {which} at operators where tools act"] = (
                "ONNX Runtime cannot fuse these, so results may differ in the last bits; they do "
                "not with ORT_DISABLE_ALL, or with AMANDA_ONNXRUNTIME_GRAPH=optimized"
            )
        found = program.run(self.session, given, wanted, run_options)
        if program.is_to_repeat(self.session):
            # Operators that run one by one, to be analysed, may round otherwise.
            return Part(session).run(_ort_values(given), run_options, wanted)
        return found

    def _owned(self, session: Any, program: Program, *how: Any) -> list[Any]:
        """Return the same outputs as values that hold their memory."""
        return [program.parts.owned(value) for value in self._run(session, program, *how)]

    def _program(self, session: Any) -> Program | None:
        """Return the model of a session under these tools; None if it runs without them."""
        program = self._programs.get(session)
        if program is None:
            parts = self._models.parts_of(session)
            if isinstance(parts, str):
                self._refuse(parts)
                return None
            root, records = self._models.names.add(parts.model)
            self._finder.add(parts.model, records, root)
            program = self._programs[session] = Program(parts.model, parts, records)
            for name in {n.operator.__name__ for n in records if n.bodies and not n.is_open}:
                why = f"it runs as one operator{_NEWER if name == 'Scan' else ''}"
                self._gaps[f"operators inside {name}"] = why
                self.session.note_inside(name, why)
        return program

    def _refuse(self, sessions: str) -> None:
        """Note that some sessions run without tools."""
        self._gaps[sessions] = "the driver has no model of them that it could cut"
        self.session.note_call("InferenceSession.run", f" in {sessions}")

    def _pass(self, program: Program, what: str) -> None:
        """Note that a run is plain although tools act in it."""
        self._gaps[what] = "this way to run a session is not instrumented"
        for record in program.records.values():
            self.session.note_call(record.site.op_type, f" in {what}")


def _arrays(session: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a program passes for inputs as arrays of their types."""
    kinds = {one.name: one.type for one in session.get_inputs()}
    return {name: array_for(value, kinds.get(name, "")) for name, value in given.items()}


def _ort_values(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: ort_value(value) for name, value in given.items()}


def _is_right(session: Any, given: Mapping[str, Any]) -> bool:
    """Return True if a session accepts inputs, as far as their names and types tell."""
    required = {one.name: one.type for one in session.get_inputs()}
    optional = {one.name: one.type for one in session.get_overridable_initializers()}
    kinds = required | optional
    names_fit = required.keys() <= given.keys() <= kinds.keys()
    return names_fit and all(fits(value, kinds[name]) for name, value in given.items())


_INTERCEPTION = Interception(OrtAttachment)


def exported(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a session's model with the edits of the applied tools; None if it is not a session."""
    if not isinstance(model, InferenceSession):
        return None
    runs = [one if isinstance(one, Mapping) else {} for one in args]
    if kwargs or not runs:
        runs.append(kwargs)
    return _INTERCEPTION.here().exported(model, runs)
