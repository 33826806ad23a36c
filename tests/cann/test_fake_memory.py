"""Device memory of the fake runtime: who may touch it, and which copies are refused."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cann.fake_acl import (
    BAD_ALLOC,
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    INVALID_PARAM,
    SUCCESS,
    FakeAcl,
)

pytestmark = pytest.mark.cann


def test_new_memory_is_nan(fake: FakeAcl) -> None:
    block = fake.malloc(64)
    assert fake.read(block, 64) == b"\xff" * 64
    assert fake.acl.aclrtFree(block) == SUCCESS


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("access", ["ctypes.string_at(block, 1)", "ctypes.memset(block, 0, 1)"])
def test_the_host_faults_on_a_device_address(access: str) -> None:
    code = (
        "import ctypes\n"
        "from tests.cann.fake_acl import FakeAcl\n"
        "block = FakeAcl.load().malloc(64)\n"
        "print('allocated', flush=True)\n"
        f"{access}\n"
    )
    done = in_a_process(code)
    assert done.stdout == "allocated\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def copy(
    fake: FakeAcl, to: int, source: int, size: int, kind: int, *, room: int | None = None
) -> int:
    return int(fake.acl.aclrtMemcpy(to, size if room is None else room, source, size, kind))


def test_a_copy_past_its_block_is_refused(fake: FakeAcl) -> None:
    block, host = fake.malloc(100), ctypes.create_string_buffer(200)
    address = ctypes.addressof(host)
    for to, source, size, kind in (
        (block, address, 101, HOST_TO_DEVICE),
        (block + 60, address, 41, HOST_TO_DEVICE),
        (block - 1, address, 4, HOST_TO_DEVICE),
        (address, block, 101, DEVICE_TO_HOST),
        (address, block + 101, 1, DEVICE_TO_HOST),
        (block, block + 60, 41, DEVICE_TO_DEVICE),
    ):
        assert copy(fake, to, source, size, kind) == INVALID_PARAM
        assert "not inside a live block" in fake.take_violation()
    assert copy(fake, block, address, 100, HOST_TO_DEVICE) == SUCCESS
    assert fake.acl.aclrtFree(block) == SUCCESS


def test_a_copy_that_does_not_fit_its_room_is_refused(fake: FakeAcl) -> None:
    block, host = fake.malloc(100), ctypes.create_string_buffer(100)
    assert copy(fake, block, ctypes.addressof(host), 9, HOST_TO_DEVICE, room=8) == INVALID_PARAM
    assert fake.take_violation() == "aclrtMemcpy host_to_device: 9 bytes do not fit into 8"
    assert fake.acl.aclrtFree(block) == SUCCESS


def test_a_copy_in_the_wrong_direction_is_refused(fake: FakeAcl) -> None:
    block, host = fake.malloc(100), ctypes.create_string_buffer(100)
    address = ctypes.addressof(host)
    for to, source, kind, told in (
        (address, block, HOST_TO_DEVICE, "the destination is not inside a live block"),
        (block, block, HOST_TO_DEVICE, "the source should be host memory"),
        (block, address, DEVICE_TO_HOST, "the destination should be host memory"),
        (address, address, DEVICE_TO_HOST, "the source is not inside a live block"),
        (block, address, DEVICE_TO_DEVICE, "the source is not inside a live block"),
        (block, block, 0, "the destination should be host memory"),
        (block, address, 17, "unsupported kind of copy 17"),
    ):
        assert copy(fake, to, source, 10, kind) == INVALID_PARAM
        assert told in fake.take_violation()
    assert fake.acl.aclrtFree(block) == SUCCESS


def test_a_freed_block_is_refused(fake: FakeAcl) -> None:
    block, host = fake.malloc(100), ctypes.create_string_buffer(100)
    assert fake.acl.aclrtFree(block) == SUCCESS
    assert fake.acl.fake_acl_is_live(block, 1) == 0
    assert copy(fake, block, ctypes.addressof(host), 10, HOST_TO_DEVICE) == INVALID_PARAM
    assert "in no live block" in fake.take_violation()
    assert fake.acl.aclrtFree(block) == INVALID_PARAM
    assert "aclrtFree: not the start of a live block" in fake.take_violation()


def test_what_is_device_and_what_is_live(fake: FakeAcl) -> None:
    block, host = fake.malloc(100), ctypes.create_string_buffer(100)
    address = ctypes.addressof(host)
    is_device, is_live = fake.acl.fake_acl_is_device, fake.acl.fake_acl_is_live
    assert is_device(block, 100)
    assert not is_device(address, 100)
    assert is_live(block, 100)
    assert is_live(block + 99, 1)
    assert not is_live(block, 101)
    assert not is_live(block + 99, 2)
    assert not is_live(address, 1)
    assert not is_live(block, 2**64 - 1)
    assert fake.acl.fake_acl_alias(block) not in (None, block)
    assert fake.acl.fake_acl_alias(address) is None
    assert fake.acl.aclrtFree(block) == SUCCESS


def test_freed_room_is_used_again(fake: FakeAcl) -> None:
    """16 GiB in all: without reuse the blocks of this test would not fit."""
    for _ in range(3):
        blocks = [fake.malloc(3 << 30) for _ in range(5)]
        assert len(set(blocks)) == 5
        for block in blocks[::2] + blocks[1::2]:
            assert fake.acl.aclrtFree(block) == SUCCESS
    assert fake.acl.aclrtFree(fake.malloc(15 << 30)) == SUCCESS


def test_the_environment_chooses_the_device(tmp_path: Path) -> None:
    code = (
        "import ctypes\n"
        "from tests.cann.fake_acl import FakeAcl\n"
        "fake = FakeAcl.load()\n"
        "fake.acl.aclrtGetSocName.restype = ctypes.c_char_p\n"
        "print(fake.acl.aclrtGetSocName().decode())\n"
        "fake.malloc(1 << 19)\n"
        "address = ctypes.c_void_p()\n"
        "print(fake.acl.aclrtMalloc(ctypes.byref(address), 1 << 20, 0), fake.violations())\n"
    )
    counts = tmp_path / "counts.json"
    chosen = {
        "TQ_FAKE_ACL_SOC": "Ascend310P3",
        "TQ_FAKE_ACL_MEMORY_MB": "1",
        "TQ_FAKE_ACL_COUNTS": str(counts),
    }
    done = in_a_process(code, **chosen)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Ascend310P3\n{BAD_ALLOC} 0\n"
    assert json.loads(counts.read_text()) == {"aclrtGetSocName": 1, "aclrtMalloc": 2}
