"""Every preset on every backend, against the oracle: codes, fields and attention.

The checks take a preset and a backend; which presets there are they learn from the table. Growing
caches and caches in place, prompts of 1, 2, 17 and 128 tokens, decoding, then one sample each of
other head sizes, groups of heads and element types, and offsets with rows wider than the codec's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.parity.backends import BEST_LEVEL, BODIES, LEVELS
from tests.parity.compare import check_rows
from tests.parity.graphs import Attention
from tests.parity.layer import LAYERS, Layer
from tests.runtime.models import DYNAMO, ids, original
from tq_onnx.codec import reference
from tq_onnx.codec.presets import HADAMARD, NO_ROTATION, PRESETS, QR, Preset
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import UNIFORM
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UsageError
from tq_onnx.runtime.opening import open_model

# The evaluator computes in numpy, which warns where the operators mean to overflow.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

PROMPTS = (1, 2, 17, 128)
CAPACITY = 32
ELEMENT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class Shape:
    """Heads and element type of a sample; one KV head is MQA, groups of one are MHA."""

    head_size: int
    dtype: str
    kv_heads: int
    group: int


SHAPES = (
    Shape(128, "float16", 1, 4),
    Shape(80, "float32", 3, 1),
    Shape(64, "bfloat16", 2, 2),
    Shape(256, "float16", 2, 1),
    Shape(96, "bfloat16", 1, 3),
    Shape(128, "float32", 2, 4),
    Shape(80, "float16", 2, 2),
    Shape(96, "float32", 2, 2),
    Shape(256, "bfloat16", 1, 2),
)
"""Presets that follow each other in the table start at different ones."""


def graph_of(preset: Preset, head_size: int = 64, dtype: str = "float32") -> Attention:
    """One layer as ``convert`` would make it."""
    rotation = QR if preset.rotation == NO_ROTATION else preset.rotation
    if head_size & (head_size - 1) and rotation == HADAMARD:
        rotation = QR  # what the refusal of such a head size tells the user to ask for
    bits = ELEMENT_BITS[dtype]
    return Attention(
        head_size,
        preset.key.for_elements(bits),
        preset.value.for_elements(bits),
        dtype,
        scale=head_size**-0.5,
        rotation=rotation,
        norm_correction=preset.norm_correction,
    )


# The suite


def check_growing(preset: Preset, backend: str) -> None:
    for prompt in PROMPTS:
        # One head is enough where there are many tokens; the oracle is not fast.
        layer = Layer(backend, graph_of(preset), 1 if prompt > 17 else 2, seed=prompt)
        layer.step(prompt)
        layer.step(1)


def check_capacity(preset: Preset, backend: str) -> None:
    # With all that a converted model may have besides: offsets, and rows wider than the codec's.
    layer = Layer(backend, replace(graph_of(preset), has_offset=True, padding=6))
    for side in LAYERS:
        layer.offsets[side] = layer.random.standard_normal((5, 2, 64)).astype(np.float32)
        layer.caches[side] = layer.empty(side, CAPACITY)
    # The evaluator has no buffers to bind.
    step = layer.step if backend == "evaluator" else layer.step_in_place
    for new in (3, 17, 1, 2):
        step(new)
    assert all(cache.shape[2] == CAPACITY for cache in layer.caches.values())


def check_shapes(preset: Preset, backend: str) -> None:
    for shape in samples(list(PRESETS).index(preset.name), backend):
        graph = graph_of(preset, shape.head_size, shape.dtype)
        layer = Layer(backend, graph, shape.kv_heads, shape.group)
        layer.step(17)
        layer.step(1)


def samples(index: int, backend: str) -> list[Shape]:
    """One for a function body, whose sessions take long to open; two for a kernel."""
    count = 1 if backend in BODIES else 2
    return [SHAPES[(index + 4 * k) % len(SHAPES)] for k in range(count)]


Check = Callable[[Preset, str], None]
SUITE: tuple[Check, ...] = (
    check_growing,
    check_capacity,
    check_shapes,
)


@pytest.mark.parametrize("backend", BEST_LEVEL)
@pytest.mark.parametrize("check", SUITE)
@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str, check: Check, backend: str) -> None:
    check(PRESETS[name], backend)


@pytest.mark.parametrize(
    ("check", "backend"),
    [(check_capacity, "body"), (check_shapes, "body"), (check_capacity, LEVELS[-1])],
)
@pytest.mark.parametrize("name", PRESETS)
def test_body_and_scalar_level(name: str, check: Check, backend: str) -> None:
    check(PRESETS[name], backend)


@pytest.mark.parametrize("backend", LEVELS)
def test_adding_a_preset_is_one_row(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Preset("k5v2", Codec(LLOYD_MAX, 5), Codec(UNIFORM, 2), HADAMARD, "a test")
    monkeypatch.setitem(PRESETS, row.name, row)
    for check in SUITE:
        check(PRESETS["k5v2"], backend)


def test_an_added_preset_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Preset("k5v2", Codec(LLOYD_MAX, 5), Codec(UNIFORM, 2), HADAMARD, "a test")
    with pytest.raises(UsageError, match="preset 'k5v2' is not one of"):
        convert(original(DYNAMO), tmp_path / "model.onnx", preset="k5v2")
    monkeypatch.setitem(PRESETS, row.name, row)
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "float")  # as the bodies
    report = convert(original(DYNAMO), tmp_path / "model.onnx", preset="k5v2")
    assert report.plan.preset == "k5v2"
    logits = []
    for library in (True, False):
        opened = open_model(tmp_path / "model.onnx", library=library, threads=1)
        decoder = opened.decoder()
        logits.append(decoder.prefill(ids(17)))
        logits.append(decoder.step(ids(1)))
        widths = [row_layout(codec, 64).row_bytes for codec in (row.key, row.value)]
        assert [decoder.cache(index).shape[-1] for index in range(2)] == widths
    for kernel, body in zip(logits[:2], logits[2:], strict=True):
        np.testing.assert_allclose(kernel, body, atol=1e-4 * np.abs(body).max())


@pytest.mark.parametrize("backend", LEVELS)
def test_samples_cover_every_shape(backend: str) -> None:
    seen = {shape for index in range(len(PRESETS)) for shape in samples(index, backend)}
    assert seen == set(SHAPES)
    assert {shape.head_size for shape in SHAPES} == {64, 80, 96, 128, 256}
    assert {shape.dtype for shape in SHAPES} == set(ELEMENT_BITS)


@pytest.mark.parametrize("name", [name for name in PRESETS if not PRESETS[name].key.is_raw])
def test_wrong_rows_would_be_noticed(name: str) -> None:
    # The oracle's own rows, with one code in a thousand, or one field, changed.
    graph = graph_of(PRESETS[name])
    layer = Layer("negative", graph)
    x = layer.floats(2, 50)
    for side in LAYERS:
        codec, (turn, book) = layer.codec(side), layer.tables(side)
        rows = reference.encode(x, codec, turn, book, graph.norm_correction)

        def check(rows: np.ndarray, codec: Codec = codec, turn: object = turn) -> None:
            correction = graph.norm_correction
            check_rows("negative", rows, x, codec, turn, norm_correction=correction)

        check(rows)
        spoilt = rows.copy()
        spoilt[0, 0, 3, 5] ^= 1
        with pytest.raises(AssertionError):
            check(spoilt)
        spoilt = rows.copy()
        spoilt[0, 0, 3, -2] ^= 4
        with pytest.raises(AssertionError):
            check(spoilt)
        with pytest.raises(AssertionError, match="bytes behind a row"):
            check(np.concatenate([rows, np.ones_like(rows[..., :2])], axis=-1))
