"""Attachments that are notified of changes, for drivers that keep compiled programs by a key."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import amanda
from amanda_core import NotifiedAttachment, Session, hookimpl
from amanda_core.errors import DriverError
from amanda_core.plugins import discovery
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyAttachment, ToyDriver

from .making import session_of, tool

Key = tuple[bool, bool, int]


class KeyedAttachment(ToyAttachment):
    """Keeps the key under which a compiling framework would look up its programs."""

    keys: list[Key]

    def changed(self) -> None:
        self.keys.append(self.key())

    def key(self) -> Key:
        session = self.session
        return session.enabled, session.caching, session.epoch


class KeyedDriver(ToyDriver):
    @hookimpl
    def amanda_attach(self, session: Session) -> Any:
        self.attachment = KeyedAttachment(self, session)
        self.attachment.keys = [self.attachment.key()]
        return self.attachment


@pytest.fixture
def keyed() -> KeyedDriver:
    plugin = KeyedDriver()
    discovery.register(plugin, "toy")
    return plugin


def doubling() -> amanda.Tool:
    return tool(lambda c: c.insert_after_op(lambda y: toy.Value(y.data * 2)))


def test_each_change_of_the_switches_is_told_once_and_nothing_else(keyed: KeyedDriver) -> None:
    with amanda.apply(doubling()):
        assert isinstance(keyed.attachment, NotifiedAttachment)
        keys = keyed.attachment.keys
        epoch = keys[0][2]
        with amanda.enabled(), amanda.autodiff_enabled():
            toy.relu(toy.Value(1.0))
        assert keys == [(True, True, epoch)]
        with amanda.disabled():
            assert keys[1:] == [(False, True, epoch)]
            with amanda.cache_disabled(), amanda.disabled():
                assert keys[2:] == [(False, False, epoch)]
            assert keys[3:] == [(False, True, epoch)]
        assert keys[4:] == [(True, True, epoch)]


def test_each_new_epoch_is_told(keyed: KeyedDriver) -> None:
    first, second = doubling(), doubling()
    with amanda.apply(first):
        keys = keyed.attachment.keys
        with amanda.apply(second):
            nested = keys[-1]
        assert keys[-1] == keys[0] != nested
        first.invalidate()
        assert keys[-1] not in (keys[0], nested)
        assert len(keys) == 4
        first.where(amanda.select(steps=range(1)))
        count = len(keys)
        amanda.step()
        assert len(keys) == count + 1
        amanda.step()
        assert len(keys) == count + 1
        # At any time the key is that of now.
        assert keyed.attachment.key() == keys[-1]


def test_other_threads_and_what_comes_after_are_not_told(keyed: KeyedDriver) -> None:
    with amanda.apply(doubling()):
        keys = keyed.attachment.keys

        def elsewhere() -> None:
            with amanda.disabled():
                pass

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    with amanda.disabled():
        pass
    assert len(keys) == 1


def test_a_failure_in_it_leaves_no_switch_half_entered(keyed: KeyedDriver) -> None:
    with amanda.apply(doubling()) as handle:
        keyed.attachment.keys = None  # type: ignore[assignment]
        with amanda.disabled():
            assert not session_of(handle).enabled
        assert session_of(handle).enabled
        with pytest.raises(DriverError, match=r"'toy' fails at a change.*AttributeError"):
            session_of(handle).raise_pending()


def test_an_attachment_may_leave_it_out(driver: ToyDriver) -> None:
    with amanda.apply(doubling()), amanda.disabled():
        assert toy.relu(toy.Value(1.0)).data == 1.0


def test_compiled_programs_kept_by_the_key_are_right_at_every_change(keyed: KeyedDriver) -> None:
    compiled: dict[Key, float] = {}

    def run() -> float:
        # As a framework does: the key is looked up before anything of the driver runs.
        key = keyed.attachment.keys[-1]
        if key not in compiled:
            compiled[key] = toy.relu(toy.Value(1.0)).data
        return compiled[key]

    first, second = doubling(), doubling()
    for _ in range(2):
        with amanda.apply(first):
            assert run() == 2.0
            with amanda.apply(second):
                assert run() == 4.0
                with amanda.disabled():
                    assert run() == 1.0
            assert run() == 2.0
    assert len(compiled) == 3
