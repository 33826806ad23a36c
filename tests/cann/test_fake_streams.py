"""Streams of the fake runtime: really asynchronous, in order, and ordered by events only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cann.fake_acl import ALWAYS, DEVICE_TO_DEVICE, INVALID_PARAM, SUCCESS, FakeAcl

pytestmark = pytest.mark.cann

SLOW = 1_000_000
"""Microseconds, far longer than a call."""


@pytest.fixture
def stream(fake: FakeAcl) -> Iterator[int]:
    stream = fake.create_stream()
    yield stream
    fake.acl.aclrtSynchronizeStream(stream)
    assert fake.acl.aclrtDestroyStream(stream) == SUCCESS


@pytest.fixture
def block(fake: FakeAcl, stream: int) -> Iterator[int]:
    block = fake.malloc(64)
    assert fake.write(block, bytes(64)) == SUCCESS
    yield block
    fake.acl.aclrtSynchronizeStream(stream)
    assert fake.acl.aclrtFree(block) == SUCCESS


def test_work_is_not_done_before_it_is_waited_for(fake: FakeAcl, stream: int, block: int) -> None:
    """A caller that forgets to synchronise reads old bytes."""
    fake.set_delay(SLOW, ALWAYS)
    assert fake.acl.aclrtMemsetAsync(block, 64, 7, 64, stream) == SUCCESS
    assert fake.read(block, 64) == bytes(64)
    assert fake.acl.aclrtSynchronizeStream(stream) == SUCCESS
    assert fake.read(block, 64) == b"\x07" * 64


def test_one_stream_keeps_its_order(fake: FakeAcl, stream: int, block: int) -> None:
    for seed in range(3):
        fake.set_delay(1000, seed)
        for value in range(1, 20):
            assert fake.acl.aclrtMemsetAsync(block, 64, value, 64, stream) == SUCCESS
        half = fake.acl.aclrtMemcpyAsync(block + 32, 32, block, 32, DEVICE_TO_DEVICE, stream)
        assert half == SUCCESS
        assert fake.acl.aclrtSynchronizeStream(stream) == SUCCESS
        assert fake.read(block, 64) == bytes([19]) * 64


def test_an_event_orders_two_streams(fake: FakeAcl, stream: int, block: int) -> None:
    other, event = fake.create_stream(), fake.create_event()
    fake.set_delay(SLOW // 20)
    assert fake.acl.aclrtMemsetAsync(block, 64, 7, 64, stream) == SUCCESS
    assert fake.acl.aclrtRecordEvent(event, stream) == SUCCESS
    assert fake.acl.aclrtStreamWaitEvent(other, event) == SUCCESS
    # The event may go while it is still waited for.
    assert fake.acl.aclrtDestroyEvent(event) == SUCCESS
    assert fake.acl.aclrtMemcpyAsync(block, 32, block + 32, 32, DEVICE_TO_DEVICE, other) == SUCCESS
    assert fake.acl.aclrtMemsetAsync(block + 32, 32, 9, 32, other) == SUCCESS
    assert fake.acl.aclrtSynchronizeStream(other) == SUCCESS
    assert fake.read(block, 64) == b"\x07" * 32 + b"\x09" * 32
    assert fake.acl.aclrtDestroyStream(other) == SUCCESS


def test_a_block_freed_too_early_is_caught(fake: FakeAcl, stream: int) -> None:
    block = fake.malloc(64)
    fake.set_delay(SLOW, ALWAYS)
    assert fake.acl.aclrtMemsetAsync(block, 64, 7, 64, stream) == SUCCESS
    assert fake.acl.aclrtFree(block) == SUCCESS
    assert fake.acl.aclrtSynchronizeStream(stream) == INVALID_PARAM
    assert "when the stream came to it" in fake.take_violation()
    assert fake.acl.aclrtSynchronizeStream(stream) == SUCCESS  # told once


def test_unknown_handles_are_refused(fake: FakeAcl) -> None:
    stream, event = fake.create_stream(), fake.create_event()
    assert fake.acl.aclrtDestroyStream(stream) == SUCCESS
    assert fake.acl.aclrtDestroyEvent(event) == SUCCESS
    for call in (
        lambda: fake.acl.aclrtSynchronizeStream(stream),
        lambda: fake.acl.aclrtDestroyStream(stream),
        lambda: fake.acl.aclrtRecordEvent(event, None),
        lambda: fake.acl.aclrtSynchronizeEvent(event),
        lambda: fake.enqueue(stream, "late", lambda _: SUCCESS),
    ):
        assert call() == INVALID_PARAM
        assert "unknown" in fake.take_violation()


def test_a_stream_may_not_go_before_its_work(fake: FakeAcl) -> None:
    stream, block = fake.create_stream(), fake.malloc(64)
    fake.set_delay(SLOW, ALWAYS)
    assert fake.acl.aclrtMemsetAsync(block, 64, 1, 64, stream) == SUCCESS
    assert fake.acl.aclrtDestroyStream(stream) == SUCCESS
    assert fake.take_violation() == "a stream was destroyed before its tasks were done"
    assert fake.acl.aclrtFree(block) == SUCCESS
