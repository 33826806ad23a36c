"""The kernels in the shim, launched on streams of the fake ACL runtime, in guarded device memory.

That the results are right is shown in ``test_kernels.py``, on host memory and at once. Here the
same calls go the way that an operator's kernel goes in the provider: copies to the device, a launch
that returns before it ran, copies back after the stream was waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulated_kernels import ARCHITECTURES, Kernels, rotation_of, row_bytes
from tests.cann.fake_acl import ALWAYS, SUCCESS, FakeAcl

pytestmark = pytest.mark.cann

HAZARD = 507015
"""ACL_ERROR_RT_AICORE_EXCEPTION: what a launch with a hazard fails with."""


class DeviceKernels(Kernels):
    """The kernels of one architecture; every array of a call is in a device block of its size."""

    def __init__(self, library: Path, fake: FakeAcl) -> None:
        super().__init__(library)
        self.fake = fake
        self.status = SUCCESS
        self.free_before_it_runs = False

    def _launch(
        self,
        kernel: str,
        arrays: Mapping[str, np.ndarray | None],
        numbers: Mapping[str, float],
        cores: int,
    ) -> dict[str, Any]:
        stream = self.fake.create_stream()
        results = {name: array.copy() for name, array in arrays.items() if array is not None}
        blocks = {name: self.fake.malloc(array.nbytes) for name, array in results.items()}
        for name, block in blocks.items():
            assert self.fake.write(block, results[name].tobytes()) == SUCCESS
        assert self._enqueue(kernel, blocks, numbers, cores, stream) == SUCCESS
        if self.free_before_it_runs:
            assert self.fake.acl.aclrtFree(blocks.pop("cache")) == SUCCESS
        self.status = self.fake.acl.aclrtSynchronizeStream(stream)
        for name, block in blocks.items():
            array = results[name]
            data = self.fake.read(block, array.nbytes)
            array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
            assert self.fake.acl.aclrtFree(block) == SUCCESS
        assert self.fake.acl.aclrtDestroyStream(stream) == SUCCESS
        return results


@pytest.fixture(params=ARCHITECTURES)
def device(
    request: pytest.FixtureRequest, kernel_files: dict[int, Path], fake: FakeAcl
) -> DeviceKernels:
    kernels = DeviceKernels(kernel_files[request.param], fake)
    kernels.reset()
    return kernels


def inputs(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """New vectors of two sequences, a cache with rows of other lengths, and those lengths."""
    rng = np.random.default_rng(size)
    vectors = rng.standard_normal((2, 2, 5, size)).astype(np.float32)
    cache = np.zeros((2, 2, 80, row_bytes(size)), np.uint8)
    return vectors, cache, np.array([70, 0])


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("delay", [0, 2000])
def test_on_the_device_as_on_the_host(
    fake: FakeAcl,
    device: DeviceKernels,
    kernel_files: dict[int, Path],
    size: int,
    delay: int,
) -> None:
    host = Kernels(kernel_files[device.arch])
    fake.set_delay(delay)
    vectors, cache, past = inputs(size)
    rotations = (rotation_of(size), rotation_of(size, 1))
    query = np.random.default_rng(9).standard_normal((2, 8, 5, size)).astype(np.float32)
    results = []
    for kernels in (device, host):
        rows = kernels.encode(vectors, cache, past, rotations[0])
        output = kernels.attention(query, rows, rows, past, rotations, scale=size**-0.5)
        assert not kernels.hazards, kernels.messages()
        results.append((rows, output))
    for ours, theirs in zip(*results, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert fake.counts()["kernel.tq_encode_float32"] == 1
    assert fake.counts()["kernel.tq_attention_float32"] == 1


def test_a_kernel_that_leaves_its_blocks_fails_on_the_stream(device: DeviceKernels) -> None:
    vectors, cache, past = inputs(64)
    device.encode(vectors, cache, past, rotation_of(64), claims={"capacity": 200})
    assert device.status == HAZARD
    assert "outside of every live block" in device.messages()[0]
    device.reset()


def test_a_block_that_is_freed_before_the_kernel_ran_is_missed(
    fake: FakeAcl, device: DeviceKernels
) -> None:
    fake.set_delay(200_000, ALWAYS)
    device.free_before_it_runs = True
    vectors, cache, past = inputs(64)
    device.encode(vectors, cache, past, rotation_of(64))
    assert device.status == HAZARD
    assert "outside of every live block" in device.messages()[0]
    device.reset()
