"""The pluggy plugin of MindSpore's driver, named by the entry point ``amanda.drivers``.

Owns the check for releases of NumPy under which MindSpore refuses NumPy's numbers. Uses MindSpore
only if it is imported already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata

from amanda_core.driver_kit import DeclaredHooks, Session
from amanda_core.interface import Attachment, Finding, hookimpl
from amanda_driver_mindspore.vocabulary import DECLARATIONS, describe


def _attachment() -> Callable[[Session], Attachment]:
    from amanda_driver_mindspore.attachment import MindsporeAttachment

    return MindsporeAttachment


def _problems() -> list[Finding]:
    try:
        version = metadata.version("numpy")
    except metadata.PackageNotFoundError:  # MindSpore cannot be imported without it.
        return []
    if int(version.partition(".")[0]) < 2:
        return []
    return [
        Finding(
            "error",
            f"MindSpore is built for NumPy 1, and refuses numbers of NumPy {version} in shapes "
            "and indices",
            "pip install 'numpy<2' 'scipy<1.15'",
        )
    ]


class _Hooks(DeclaredHooks):
    @hookimpl
    def amanda_preflight(self) -> Sequence[Finding]:
        """Look for problems of this environment that would make results wrong.

        The self-test compares what tools see with MindSpore's own dispatcher. It takes seconds, so
        a program that uses MindSpore does not wait for it.
        """
        found = super().amanda_preflight()
        if not self.versions.is_tried() or any(one.severity == "error" for one in found):
            return found
        ask = self.versions.kept_failure if self.is_loaded() else self.versions.tested
        failure = ask("python")
        if failure is None:
            return found
        if failure:
            return [*found, Finding("error", failure, self.versions.install_tried)]
        message = "The self-test found no operator in MindSpore's dispatcher that tools do not see"
        return [*found, Finding("info", message)]


_HOOKS = _Hooks(DECLARATIONS, describe, _attachment, _problems)

amanda_attach = _HOOKS.amanda_attach
amanda_driver_info = _HOOKS.amanda_driver_info
amanda_driver_status = _HOOKS.amanda_driver_status
amanda_preflight = _HOOKS.amanda_preflight
amanda_prepare_context = _HOOKS.amanda_prepare_context
