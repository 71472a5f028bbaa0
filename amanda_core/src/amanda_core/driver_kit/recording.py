"""`Recorder`: how a driver records a row for every value itself, without calls of Python.

Owns what a tool and a driver agree on. A driver that has a recorder offers it by `Facts.recorder`;
otherwise the tool does the same with the driver's facts, which takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Keeper", "Recorder"]


class Keeper(Protocol):
    """Questions of a recorder to the tool that it works for.

    Methods that get a tensor are only called for those that the recorder cannot read itself, and
    for the first one of a dtype and shape.
    """

    def flush(self) -> None:
        """Write the pending rows, of which there are many."""

    def number_of_type(self, tensor: Any) -> int:
        """Return the number that stands for the dtype, shape and placement of a tensor in rows."""

    def digest_of_type(self, number: int) -> int:
        """Return a digest of the dtype, shape and placement that have a number, for visits."""

    def digest(self, tensor: Any) -> int | None:
        """Return the digest of the elements of a tensor; None if they cannot be read."""

    def version(self, tensor: Any) -> int | None:
        """Return what `Facts.version` does."""

    def norms(self, tensor: Any) -> tuple[float, float, bool]:
        """Return the 2-norm, the largest magnitude, and whether all elements are equal."""

    def thread(self) -> int:
        """Return the number of the calling thread."""

    def record_states(self) -> None:
        """Record the states of random generators, before the first row of a step."""

    def kept(self, tensor: Any) -> Sequence[Any] | None:
        """Return what `Recorder.take` returned of a tensor; None for others."""


class Recorder(Protocol):
    """Records a row for each tensor that an operator reads or writes.

    A row has the fields ``<IIIIIIHHBBHQff`` of `struct`: order, operator, step, execution, order of
    the operator that made the value, type, position, item, kind, flags, thread, digest, norm,
    largest magnitude. `amanda_tools.fingerprint.files` says what each means. The digest is XXH3
    with 64 bits of the elements in C order.

    Attributes:
        order: The order of the last rows.
        step: Number of the step.
        check: Of so many inputs that no counted write has changed since they were last read,
            without an operator of another part of the step in between, one is read again.
        small: Inputs of fewer bytes are all read again.
        takes: Whether this step is recorded.
        due: Whether states of random generators are recorded next.
        with_norms: Whether norms are recorded.
        has_kept: Whether `Keeper.kept` knows tensors.
        spent: Time spent so far, in nanoseconds.
        first: When the first call began, on the clock of `time.perf_counter_ns`.
        last: When the last call ended.
    """

    order: int
    step: int
    check: int
    small: int
    takes: bool
    due: bool
    with_norms: bool
    has_kept: bool
    spent: int
    first: int
    last: int

    def notes(
        self,
        number: int,
        part: int,
        is_empty: bool,
        rearranges: bool,
        overwrites: bool,
        digest: int = 0,
        group: int = 0,
        group_digest: int = 0,
        is_loading: bool = False,
        /,
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the routines before and after an operator.

        Args:
            number: Number of the operator.
            part: Number of the part of a step to which it belongs.
            is_empty: Whether it returns memory that nothing has written.
            rearranges: Whether it returns the elements of its inputs.
            overwrites: Whether it writes all of its first input.
            digest: Digest of the operator. This and the others only matter after `join`.
            group: Number of the module and phase that its visits are of.
            group_digest: Digest of these.
            is_loading: Whether it is left out.
        """

    def join(self, of_steps: bool, /) -> None:
        """From now on, add rows of visits of modules instead of rows of values.

        A visit has a row with the digest of the values that its operators read and others wrote,
        and one of what they wrote, at position 0. Rows at other positions say which values are
        not in these. `amanda_tools.fingerprint.visits` says what the digests are of.

        Args:
            of_steps: Whether visits have no rows either, but each step one digest.
        """

    def close(self, end: bool, /) -> tuple[int, int, int] | None:
        """Add the rows of the visits in progress.

        Args:
            end: Whether these visits and the step end.

        Returns:
            If steps have digests: the order of the first visit, the sum of the digests of visits,
            and the flags of values that are not in it. None if there are none.
        """

    def next(self) -> int:
        """Return the order of rows that the tool adds itself."""

    def take(self) -> list[tuple[Any, Sequence[Any]]]:
        """Forget all tensors, and return those that are alive and what was known of each."""
