"""Drivers and tools use only public names of the core, in Python and in C."""

from __future__ import annotations

import ast
import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from amanda_core.identity import sites
from amanda_core.runtime.switches import (
    CACHING,
    ENABLED,
    EPOCH,
    LAYOUT_VERSION,
    ROUTINE_DEPTH,
    VERSION,
)
from amanda_core.runtime.threads import THREAD, inside_routine
from amanda_core.testing.checks.private_names import (
    has_underscore,
    mentions,
    mentions_in_c,
    own_names,
)

pytestmark = pytest.mark.one_interceptor

ROOT = Path(__file__).parents[2]
MEMBERS = [
    "amanda_driver_jax",
    "amanda_driver_mindspore",
    "amanda_driver_mxnet",
    "amanda_driver_onnxruntime",
    "amanda_driver_tf",
    "amanda_driver_torch",
    "amanda_tools",
]
HEADERS = sorted(path.name for path in (ROOT / "amanda_core/src").rglob("*.h"))
#: These name private things of the frameworks, some of which are called like ones of the core.
OF_FRAMEWORKS = (
    *("jax_internals", "mindspore_internals", "mxnet_internals", "onnxruntime_internals"),
    *("tensorflow_internals", "torch_internals", "torch_symbols", "bindings"),
)


def sources(member: str) -> dict[Path, str]:
    found = (
        p for p in (ROOT / member / "src").rglob("*") if p.suffix in (".py", ".c", ".cpp", ".h")
    )
    return {path: path.read_text("utf-8") for path in sorted(found)}


def names_in(texts: dict[Path, str]) -> frozenset[str]:
    names = own_names(text for path, text in texts.items() if path.suffix == ".py")
    return frozenset(name for name in names if has_underscore(name))


@functools.cache
def names_of(member: str) -> frozenset[str]:
    return names_in(sources(member))


def private_names_of_the_core(path: Path, text: str, member: frozenset[str]) -> list[str]:
    """Return the places where a source of a member uses a private name of the core."""
    if path.suffix == ".py":
        in_file = own_names([text])
        found = mentions(text, "amanda_core", member, theirs=names_of("amanda_core"))
    else:
        in_file = frozenset()
        found = mentions_in_c(text, "amanda_core", member)
    of_core = []
    for line, name in found:
        private = {part for part in name.split(".") if has_underscore(part)}
        if name.startswith("amanda_core") or private & (names_of("amanda_core") - in_file):
            of_core.append(f"{path.name}:{line}: {name}")
    return of_core


@pytest.mark.parametrize("member", MEMBERS)
def test_no_member_uses_private_names_of_the_core(member: str) -> None:
    own = names_of(member)
    found = [
        line
        for path, text in sources(member).items()
        if not any(part in OF_FRAMEWORKS for part in (path.parent.name, path.stem))
        for line in private_names_of_the_core(path, text, own)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("planted.py", "def f(session): return session._store"),
        ("planted.py", "from amanda_core.engine.context import _UNSET"),
        ("planted.py", "def f(context): return getattr(context, '_recorder')"),
        ("planted.cpp", 'PyObject_GetAttrString(context, "_recorder");'),
    ],
)
def test_one_that_is_planted_is_found(file: str, planted: str) -> None:
    own = names_of("amanda_driver_torch")
    assert len(private_names_of_the_core(Path(file), planted, own)) == 1


# A driver and its framework may use a name that the core uses, too. So the search above passes over
# the names that a member defines, and over the modules with its framework's names. The one below
# passes over neither, and lists the uses that are of other objects.

#: Uses of names that private attributes of the core have, too, by module -> whose they are.
OF_OTHERS = {
    ("body", "body._add"): "a class of the TensorFlow driver",
    ("twins", "twins._found"): "a class of the TensorFlow driver",
    ("objects", "graph._lock"): "TensorFlow",
    ("objects", "op._id"): "TensorFlow",
    ("objects", "_value"): "TensorFlow",
    ("objects", "_name"): "TensorFlow",
    ("tapes", "context._context"): "TensorFlow",
    ("eager_checks", "_context"): "TensorFlow",
    ("modules", "_parameters"): "PyTorch",
    ("bindings", "_backward"): "PyTorch",
}
#: Methods of named tuples.
OF_PYTHON = frozenset({"_make", "_replace"})
BESIDE = ("cli", "config", "testing")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def attributes_of(text: str) -> frozenset[str]:
    """Return the private attributes and methods of the classes in a Python source."""
    found: set[str] = set()
    for class_ in ast.walk(ast.parse(text)):
        if isinstance(class_, ast.ClassDef):
            for node in ast.walk(class_):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
            for statement in class_.body:
                if isinstance(statement, ast.FunctionDef):
                    found.add(statement.name)
                elif isinstance(statement, ast.Assign):
                    found.update(t.id for t in statement.targets if isinstance(t, ast.Name))
            found.update(slots_of(class_))
    return frozenset(name for name in found if has_underscore(name))


def slots_of(tree: ast.AST) -> set[str]:
    return {
        text.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__slots__"
        for text in ast.walk(node.value)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    }


#: Private attributes of the objects that the engine gives to drivers and tools.
ATTRIBUTES = (
    frozenset().union(
        *(
            attributes_of(text)
            for path, text in sources("amanda_core").items()
            if path.suffix == ".py" and not set(BESIDE) & set(path.parts)
        )
    )
    - OF_PYTHON
)


def uses_of_attributes(path: Path, text: str) -> list[str]:
    """Return where a source uses a private attribute of the core, of objects but its own ``self``.

    In C, where attributes are looked up by names that macros write, it is every such word.
    """
    if path.suffix != ".py":
        words = re.findall(r"\b_\w+", _COMMENT.sub("", text))
        return [f"{path.name}: {word}" for word in words if word in ATTRIBUTES]
    return [
        f"{path.name}:{line}: {what}"
        for line, what in python_uses(text)
        if (path.stem, what) not in OF_OTHERS
    ]


def python_uses(text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    names = ATTRIBUTES - slots_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in names:
            yield node.lineno, str(node.value)


PLANTED = {
    ".py": "def planted(session): return session.{}\n",
    ".c": "X({})\n",
    ".cpp": 'PyObject_GetAttrString(context, "{}");\n',
    ".h": "    X(attrs) X({}) \\\n",
}


@pytest.mark.parametrize("member", MEMBERS)
def test_no_source_of_a_member_uses_an_attribute_of_the_cores_objects(member: str) -> None:
    names = ("_amanda", "_store", "_key")
    assert {*names, "_plans", "_forward", "_hooks"} < ATTRIBUTES
    for path, text in sources(member).items():
        # In each source those that are planted are found, also where its own objects have the name.
        planted = "".join(PLANTED[path.suffix].format(name) for name in names)
        uses = uses_of_attributes(path, planted + text)
        assert [name for use, name in zip(uses, names, strict=False) if use.endswith(name)] == [
            *names
        ]
        assert uses[len(names) :] == []


def test_the_uses_of_names_of_others_are_there() -> None:
    found = {
        (path.stem, what)
        for member in MEMBERS
        for path, text in sources(member).items()
        if path.suffix == ".py" and path.stem in {stem for stem, _ in OF_OTHERS}
        for _, what in python_uses(text)
    }
    assert found == set(OF_OTHERS)


def text_of(member: str, header: str) -> str:
    (path,) = (ROOT / member / "src").rglob(header)
    return path.read_text("utf-8")


def test_what_native_code_shares_is_two_headers() -> None:
    assert HEADERS == ["amanda_identity.h", "amanda_switches.h"]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("member", ["amanda_driver_tf", "amanda_driver_torch"])
def test_the_headers_of_a_driver_are_those_of_the_core(member: str, header: str) -> None:
    assert text_of(member, header) == text_of("amanda_core", header)


@pytest.mark.parametrize("member", ["amanda_driver_tf", "amanda_driver_torch"])
def test_one_header_alone_knows_the_interpreters_frames(member: str) -> None:
    own = {path.name: text for path, text in sources(member).items() if path.suffix != ".py"}
    known = [name for name, text in own.items() if "pycore_frame" in text or "f_back" in text]
    assert known == ["amanda_identity.h"]


@pytest.mark.parametrize("member", ["amanda_driver_tf", "amanda_driver_torch"])
def test_private_names_of_cpython_stand_in_that_header_only(member: str) -> None:
    """Builds are optional: a version without one of them would leave the slow interceptor."""
    texts = {path.name: text for path, text in sources(member).items() if path.suffix != ".py"}
    names = {name: re.findall(r"\b_Py[A-Z]\w*", _COMMENT.sub("", texts[name])) for name in texts}
    found = {(name, private) for name in names if name not in HEADERS for private in names[name]}
    assert found <= {("identity.h", "_PyObject_GetDictPtr")}
    assert names["amanda_identity.h"]


def test_the_constants_of_the_rule_of_identity_are_those_of_the_header() -> None:
    constants = {}
    for body in re.findall(r"enum \{(.+?)\}", text_of("amanda_core", "amanda_identity.h")):
        for number, field in enumerate(body.split(",")):
            name, _, value = field.partition("=")
            constants[name.strip()] = int(value or number)
    assert constants == {
        "AMANDA_USER": sites.USER,
        "AMANDA_FRAMEWORK": sites.FRAMEWORK,
        "AMANDA_OWN": sites.OWN,
        "AMANDA_STOP": sites.STOP,
        "AMANDA_QUIET": sites.QUIET,
        "AMANDA_SITE_FRAMES": sites.FRAMES,
        "AMANDA_OCCURRENCES": sites.OCCURRENCES,
        "AMANDA_UNMARKED_FROM": sites.UNMARKED_FROM,
    }


class Switches(ctypes.Structure):
    """The struct of the header, field by field."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("version", "enabled", "caching", "epoch", "routine_depth")
    ]


def test_the_buffer_is_laid_out_as_the_header_says() -> None:
    fields = [
        line.split()[1].rstrip(";")
        for line in text_of("amanda_core", "amanda_switches.h").splitlines()
        if line.strip().startswith("int64_t")
    ]
    assert fields == [field[0] for field in Switches._fields_]
    positions = (VERSION, ENABLED, CACHING, EPOCH, ROUTINE_DEPTH)
    assert positions == tuple(range(len(fields)))
    switches = Switches.from_buffer(THREAD.control.switches)
    assert (switches.version, switches.enabled, switches.caching) == (LAYOUT_VERSION, 1, 1)
    with inside_routine():
        assert switches.routine_depth == 1
    assert switches.routine_depth == 0
    control = THREAD.control
    control.enter("enabled", False, control)
    assert switches.enabled == 0
    control.leave("enabled", control)
    assert switches.enabled == 1
