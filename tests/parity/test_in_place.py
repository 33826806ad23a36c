"""Fixed-capacity caches: the same buffer as past and present, step after step."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from tests.parity.backends import LEVELS_AND_BODY, run, session
from tests.parity.compare import check_attention, check_rows
from tests.parity.graphs import KEY_LAYER, VALUE_LAYER, Attention, rotation, step_model
from tests.parity.test_encode import vectors
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec, row_layout

CAPACITY = 64
STEPS = (17, 1, 1, 2, 1, 5)
SENTINEL = 0xC3
GRAPH = Attention(128, 4, 3)
SIDES = {"key": (4, KEY_LAYER), "value": (3, VALUE_LAYER)}


def cache(batch: int, bits: int) -> np.ndarray:
    row_bytes = row_layout(Codec(LLOYD_MAX, bits), 128).row_bytes
    return np.full((batch, 2, CAPACITY, row_bytes), SENTINEL, np.uint8)


@pytest.mark.parametrize("backend", LEVELS_AND_BODY)
@pytest.mark.parametrize("past", [(0,), (3, 0, 20)], ids=["together", "own-lengths"])
def test_steps(past: tuple[int, ...], backend: str) -> None:
    batch = len(past)
    caches = {
        side: onnxruntime.OrtValue.ortvalue_from_numpy(cache(batch, bits))
        for side, (bits, _) in SIDES.items()
    }
    addresses = {side: value.data_ptr() for side, value in caches.items()}
    lengths = np.array(past, np.int64)
    opened = session(backend, step_model(GRAPH))
    for step, new in enumerate(STEPS):
        new_rows = {
            side: vectors(batch, 2, new, 128, seed=step + 10 * layer).astype(np.float32)
            for side, (_, layer) in SIDES.items()
        }
        query = np.random.RandomState(step).standard_normal((batch, 4, new, 128)).astype(np.float32)
        before = {side: value.numpy().copy() for side, value in caches.items()}
        binding = opened.io_binding()
        binding.bind_output("output")
        for side, value in caches.items():
            binding.bind_cpu_input(side, new_rows[side])
            binding.bind_ortvalue_input(f"past_{side}", value)
            binding.bind_ortvalue_output(f"present_{side}", value)
        binding.bind_cpu_input("query", query)
        binding.bind_cpu_input("past_length", lengths)
        opened.run_with_iobinding(binding)
        output = binding.copy_outputs_to_cpu()[0]
        after = {side: value.numpy() for side, value in caches.items()}
        for side, (bits, layer) in SIDES.items():
            assert caches[side].data_ptr() == addresses[side]
            for b, length in enumerate(lengths):
                rows = slice(length, length + new)
                check_rows(
                    backend,
                    after[side][b, :, rows],
                    new_rows[side][b],
                    Codec(LLOYD_MAX, bits),
                    rotation(128, layer),
                )
                before[side][b, :, rows] = after[side][b, :, rows]
            assert np.array_equal(after[side], before[side])  # nothing else was touched
        expected = reference.attention(
            query,
            after["key"],
            after["value"],
            lengths,
            key=Codec(LLOYD_MAX, 4),
            value=Codec(LLOYD_MAX, 3),
            key_rotation=rotation(128, KEY_LAYER),
            key_codebook=lloyd_max(4, 128).centroids,
            value_rotation=rotation(128, VALUE_LAYER),
            value_codebook=lloyd_max(3, 128).centroids,
            scale=GRAPH.scale,
            causal=True,
        )
        check_attention(backend, "float32", output, expected)
        lengths = lengths + new


@pytest.mark.parametrize("backend", LEVELS_AND_BODY)
def test_growing_caches_hold_the_same_bytes(backend: str) -> None:
    growing = {side: cache(1, bits)[:, :, :0] for side, (bits, _) in SIDES.items()}
    fixed = {side: cache(1, bits) for side, (bits, _) in SIDES.items()}
    length = 0
    for step, new in enumerate(STEPS):
        feeds = {
            side: vectors(1, 2, new, 128, seed=step + 10 * layer).astype(np.float32)
            for side, (_, layer) in SIDES.items()
        }
        feeds["query"] = np.random.RandomState(step).standard_normal((1, 4, new, 128))
        feeds["query"] = feeds["query"].astype(np.float32)
        feeds["past_length"] = np.array([length], np.int64)
        outputs = []
        for caches in (growing, fixed):
            past = {f"past_{side}": value for side, value in caches.items()}
            output, caches["key"], caches["value"] = run(backend, step_model(GRAPH), feeds | past)
            outputs.append(output)
        length += new
        for side in SIDES:
            assert growing[side].shape[2] == length
            assert np.array_equal(fixed[side][:, :, :length], growing[side])
            assert (fixed[side][:, :, length:] == SENTINEL).all()
        np.testing.assert_array_equal(*outputs)
