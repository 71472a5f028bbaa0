"""Registration of operators that no interceptor can find: bindings of a user's own C++ extension.

Owns the list of registered functions, which patches replace while a session is attached. Operators
registered with ``torch.library`` or used through ``torch.ops`` need no registration here.
"""

from __future__ import annotations

from typing import Any

from amanda_core.interface import ActionError

__all__ = ["register_op", "registered", "unregister_op"]

_REGISTERED: dict[tuple[int, str], tuple[Any, str, str]] = {}


def register_op(owner: Any, name: str, op_type: str | None = None) -> None:
    """Treat calls of ``owner.name`` as an operator, from the next `apply` on.

    A call that looks the function up on `owner` is seen. One through a reference taken earlier is
    not.

    Args:
        owner: The module or class that holds the function.
        name: The attribute.
        op_type: Name of the operator in contexts; by default `name`.

    Raises:
        ActionError: `owner` has no such function.

    >>> import types
    >>> extension = types.SimpleNamespace(scale=lambda x: x * 2)
    >>> register_op(extension, "scale")
    >>> unregister_op(extension, "scale")
    """
    if not callable(getattr(owner, name, None)):
        raise ActionError(
            f"{owner!r} has no function {name!r}",
            where="amanda_driver_torch.extensions.register_op",
            fix="Pass the module or class that holds the binding, and the binding's name",
        )
    _REGISTERED[id(owner), name] = (owner, name, op_type or name)


def unregister_op(owner: Any, name: str) -> None:
    """Undo `register_op`, from the next `apply` on; does nothing if it was not registered."""
    _REGISTERED.pop((id(owner), name), None)


def registered() -> tuple[tuple[Any, str, str], ...]:
    """Return owner, attribute and op type of each registered function."""
    return tuple(_REGISTERED.values())
