"""Making tools: finding a factory by name, its options, and calling it.

Owns the import of a tool's module, which happens only when the tool is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import keyword
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from amanda_core.config.convert import MismatchError, convert, expected
from amanda_core.config.schema import RESERVED, nearest
from amanda_core.config.settings import Selecting, ToolSettings
from amanda_core.config.text import short
from amanda_core.engine import selection
from amanda_core.engine.tool import Tool
from amanda_core.errors import AmandaError, BrokenToolError, OptionError, UnknownToolError
from amanda_core.plugins import tool_names
from amanda_core.plugins.installed import Installed
from amanda_core.runtime.containment import contain, described

__all__ = ["Option", "factory", "make", "options"]


_ENTRY = "The entry point must be a Tool class, or a function that returns a tool"
#: An annotation whose values cannot be written as text.
_CODE_ONLY = type


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a tool: a parameter of its factory.

    Attributes:
        name: Its name. A parameter such as ``from_``, whose name would be a word of Python, is the
            option ``from``.
        annotation: The type that values are converted to.
        expected: The type in words; empty if it can be given in code only.
        required: Whether it has no default.
        default: The default, if it has one.
    """

    name: str
    annotation: Any
    expected: str
    required: bool
    default: Any = None

    @property
    def parameter(self) -> str:
        """Return the name of the parameter."""
        return f"{self.name}_" if keyword.iskeyword(self.name) else self.name


def factory(
    reference: str, where: str = "", every: Sequence[Installed] | None = None
) -> Callable[..., Any]:
    """Return the factory of a tool: that of an installed one, or the user's own ``module:Class``.

    Args:
        reference: The tool.
        where: Where it is named, for messages.
        every: All installed tools, if they are known.

    Raises:
        UnknownToolError: There is none, or it is blocked.
        BrokenToolError: It cannot be loaded; the cause is chained.
    """
    if ":" in reference:
        return _own(reference, where)
    found = _installed(reference, where, every)
    what = f"The tool {reference!r} of {found.origin} cannot be loaded"
    with _loading(what, where, "Reinstall or upgrade it"):
        made = found.point.load()
    return _callable(made, reference, where)


@contextmanager
def _loading(
    what: str, where: str, fix: str, passing: type[AmandaError] | tuple[()] = ()
) -> Iterator[None]:
    """Turn exceptions of a tool's code in this block into a `BrokenToolError`. Ctrl-C passes."""
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        contain(error)
        raise BrokenToolError(f"{what}: {described(error)}", where=where, fix=fix) from error


def _installed(reference: str, where: str, every: Sequence[Installed] | None) -> Installed:
    found = tool_names.candidates(reference, every)
    if not found:
        raise _unknown(reference, where)
    if found[0].blocked:
        raise UnknownToolError(
            f"The tool {reference!r} is blocked by {found[0].blocked}",
            where=where,
            fix="Take it out there",
        )
    if len(found) > 1:
        origins = " and ".join(one.origin for one in found)
        raise BrokenToolError(
            f"The tool {reference!r} is in several distributions: {origins}",
            where=where,
            fix=f"Say which one: {found[0].distribution or 'DISTRIBUTION'}/{found[0].name}",
        )
    return found[0]


def options(made: Callable[..., Any], reference: str = "") -> tuple[Option, ...]:
    """Return the options of a factory, in the order of its parameters.

    Raises:
        BrokenToolError: Its parameters cannot be determined.
    """
    what = f"The tool {reference or made!r} does not declare its options"
    with _loading(what, "", _ENTRY):
        return _options(made)


def _options(made: Callable[..., Any]) -> tuple[Option, ...]:
    # Not inspect.signature(class): Tool.__new__ takes anything, and which of the two methods it
    # looks at differs by version.
    is_class = inspect.isclass(made)
    function: Any = made.__init__ if is_class else made
    if function is object.__init__:
        return ()
    parameters = list(inspect.signature(function).parameters.values())[is_class:]
    hints = _hints(function)
    found = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            annotation = hints.get(parameter.name, parameter.annotation)
            if annotation is parameter.empty:
                plain = type(default) in (bool, int, float, str)
                annotation = type(default) if plain else Any if default is None else _CODE_ONLY
            plain_name = parameter.name.removesuffix("_")
            name = plain_name if keyword.iskeyword(plain_name) else parameter.name
            words = "" if name in RESERVED else expected(annotation)
            found.append(Option(name, annotation, words, required, default))
    return tuple(found)


def make(settings: ToolSettings) -> Tool:
    """Make the tool, with its options and restricted to its selection.

    Raises:
        UnknownToolError, BrokenToolError: See `factory`.
        OptionError: An option is unknown, missing or of another type, or the tool refuses it.
    """
    reference = settings.reference
    make_tool = factory(reference, settings.where)
    known = options(make_tool, reference)
    arguments = _arguments(settings, known)
    wheres = dict.fromkeys([s.where for s in settings.options.values()] or [settings.where])
    where = ", ".join(wheres)
    try:
        tool = make_tool(**arguments)
    except AmandaError as error:
        if error.where:
            raise
        where = f"the tool {reference!r}, {where}"
        raise type(error)(error.what, where=where, fix=error.fix) from error
    except BaseException as error:
        contain(error)
        raise OptionError(
            f"The tool {reference!r} refuses its options: {described(error)}",
            where=where,
            fix=f"`amanda tools {reference}` lists them",
        ) from error
    if not isinstance(tool, Tool):
        raise BrokenToolError(
            f"{reference!r} does not make an amanda.Tool but {type(tool).__qualname__}",
            where=settings.where,
            fix=_ENTRY,
        )
    for name in settings.options:
        if _is_common(name, known):
            attribute, annotation = _COMMON[name]
            if not hasattr(tool, attribute):
                why = getattr(tool, "cannot_bake", "") if name == "save" else ""
                raise _no_option(settings, name, [option.name for option in known], why)
            setattr(tool, attribute, _converted(settings, name, annotation))
    return _restricted(tool, settings.select)


#: Option that tools have without declaring it -> the attribute of a tool that it sets, and its
#: type. A tool without the attribute does not have the option.
_COMMON: dict[str, tuple[str, Any]] = {"whole": ("whole", bool), "save": ("saves_to", str)}


def _is_common(name: str, known: tuple[Option, ...]) -> bool:
    """Return True for an option that tools have without declaring it."""
    return name in _COMMON and all(option.name != name for option in known)


def _no_option(
    settings: ToolSettings, name: str, others: Iterable[str], why: str = ""
) -> OptionError:
    return OptionError(
        f"The tool {settings.reference!r} has no option {name[:80]!r}",
        where=settings.options[name].where,
        fix=why or nearest(name, others),
    )


def _converted(settings: ToolSettings, name: str, annotation: Any) -> Any:
    setting = settings.options[name]
    try:
        return convert(setting, annotation)
    except MismatchError as error:
        raise OptionError(
            f"The option {name!r} of tool {settings.reference!r} must be {error}, "
            f"not {short(setting.value)}",
            where=setting.where,
        ) from None


def _arguments(settings: ToolSettings, known: tuple[Option, ...]) -> dict[str, Any]:
    reference = settings.reference
    by_name = {option.name: option for option in known if option.expected}
    arguments = {}
    for name, setting in settings.options.items():
        if _is_common(name, known):
            continue
        option = by_name.get(name)
        if option is None and name in {option.name for option in known}:
            raise OptionError(
                f"The option {name!r} of tool {reference!r} can be given in code only",
                where=setting.where,
                fix=nearest(name, by_name),
            )
        if option is None:
            raise _no_option(settings, name, by_name)
        arguments[option.parameter] = _converted(settings, name, option.annotation)
    missing = [o.name for o in known if o.required and o.parameter not in arguments]
    if missing:
        raise OptionError(
            f"The tool {reference!r} needs the option {missing[0]!r}",
            where=settings.where,
            fix=f"Give it: -t {reference}:{missing[0]}=VALUE",
        )
    return arguments


def _restricted(tool: Tool, select: Selecting) -> Tool:
    if not select:
        return tool

    try:
        chosen = selection.select(
            op=select.ops or (),
            module=select.modules or (),
            namespace=select.namespace or "",
            steps=select.steps,
            calls=select.calls,
        )
        return tool.where(chosen)
    except AmandaError as error:
        raise type(error)(error.what, where=select.where or error.where, fix=error.fix) from error


def _own(reference: str, where: str) -> Callable[..., Any]:
    source, _, attribute = reference.partition(":")
    what = f"The tool {reference!r} cannot be loaded"
    form = "Write module:Class or path/to/file.py:Class"
    with _loading(what, where, form, passing=AmandaError):
        if source.endswith(".py"):
            module = _module_of(Path(source), where)
        else:
            module = importlib.import_module(source)
        return _callable(attrgetter(attribute)(module), reference, where)


def _module_of(path: Path, where: str) -> Any:
    path = Path(os.path.expanduser(path)).resolve()
    if not path.is_file():
        raise UnknownToolError(f"There is no file {str(path)!r}", where=where, fix="Check the path")
    # Under another name, so that it does not take the place of a module that the program imports.
    name = f"amanda_tool_{path.stem}_{abs(hash(str(path))):x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _callable(made: Any, reference: str, where: str) -> Callable[..., Any]:
    if not callable(made):
        raise BrokenToolError(
            f"{reference!r} is not a class or function but {type(made).__qualname__}",
            where=where,
            fix=_ENTRY,
        )
    found: Callable[..., Any] = made
    return found


def _unknown(reference: str, where: str) -> UnknownToolError:
    # Only this name: suggesting similarly named distributions would invite impostors.
    every = tool_names.references()
    known = [known for known, found in every if known and not found.blocked]
    upgrade = "--upgrade " if any(tool_names.is_shipped(found) for _, found in every) else ""
    return UnknownToolError(
        f"No tool {reference[:80]!r} is installed",
        where=where,
        fix=f"{nearest(reference, known, 'is installed')}. Perhaps it is in another version of the "
        f"built-in tools: pip install {upgrade}{tool_names.SHIPPED}",
    )


def _hints(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except BaseException as error:
        contain(error)
        # One annotation that exists only for type checkers would make all of them fail, so each is
        # evaluated by itself.
        hints = {}
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        for name, annotation in getattr(function, "__annotations__", {}).items():
            try:
                one = SimpleNamespace(__annotations__={name: annotation})
                hints[name] = get_type_hints(one, scope)[name]
            except BaseException as error:
                contain(error)
                hints[name] = _CODE_ONLY
        return hints
