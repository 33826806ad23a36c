"""Caches whose codes and fields lie apart hold the bytes of rows, elsewhere."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.models import DYNAMO, ids, original
from tq_onnx.codec.planes import field_bytes, planes_of_rows, rows_of_planes
from tq_onnx.codec.spec import CODECS, Codec
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.files.load import load
from tq_onnx.plan import METADATA_DIGEST, plan_in
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.opening import open_model
from tq_onnx.targets.registry import target_of

_FOLDER = tempfile.TemporaryDirectory(prefix="tq-onnx-planes-")
_WINDOWS = ((0, 0), (5, 2))


@cache
def model(window: tuple[int, int], has_planes: bool) -> Path:
    output = Path(_FOLDER.name) / f"{window[0]}.{has_planes}.onnx"
    recent, sinks = window
    options = Options(residual_length=recent, sink_tokens=sinks, planes=has_planes)
    convert(original(DYNAMO), output, options=options)
    return output


def decoder(window: tuple[int, int], has_planes: bool, *, library: bool = True) -> Decoder:
    path = model(window, has_planes)
    return open_model(path, library=library, threads=2).decoder(batch=2)


def planes(of: Decoder) -> list[np.ndarray]:
    return [of.plane(index) for index in range(len(of.signature.caches))]


@pytest.mark.parametrize("window", _WINDOWS)
@pytest.mark.parametrize("library", [True, False])
def test_planes_have_the_bits_of_rows(window: tuple[int, int], library: bool) -> None:
    tokens = ids(40, batch=2, seed=3)
    both = [decoder(window, has_planes, library=library) for has_planes in (False, True)]
    for start, stop in ((0, 17), (17, 18), (18, 19), (19, 37), (37, 40)):
        rows, apart = (each.prefill(tokens[:, start:stop]) for each in both)
        np.testing.assert_array_equal(rows, apart)
    for rows, apart in zip(*map(planes, both), strict=True):
        np.testing.assert_array_equal(rows, apart)
    held = [each.snapshot() for each in both]
    for each in both:
        each.rewind(20)
    rows, apart = (each.step(tokens[:, 20]) for each in both)
    np.testing.assert_array_equal(rows, apart)
    for each, kept in zip(both, held, strict=True):
        each.restore(kept)
    rows, apart = (each.step(tokens[:, 1]) for each in both)
    np.testing.assert_array_equal(rows, apart)


@pytest.mark.parametrize("window", _WINDOWS)
def test_codes_and_fields_are_tensors_of_their_own(window: tuple[int, int]) -> None:
    path = model(window, True)
    opened = open_model(path, threads=1).decoder(capacity=48)
    opened.prefill(ids(30))
    plan = plan_in(load(path).model.metadata_props)
    assert plan is not None
    layer = plan.layers[0]
    buffer = opened._caches.past[0].numpy()
    rows = opened.plane(0)[0, :, plan.overlay_rows :]
    fields = field_bytes(layer.key.codec, layer.head_size)
    codes = layer.key.row_bytes - fields
    size = layer.kv_num_heads * 48
    flat = buffer.reshape(-1)
    found = flat[: size * codes].reshape(layer.kv_num_heads, 48, codes)
    np.testing.assert_array_equal(found[:, :30], rows[:, :30, :codes])
    found = flat[size * codes : size * (codes + fields)].reshape(layer.kv_num_heads, 48, fields)
    np.testing.assert_array_equal(found[:, :30], rows[:, :30, codes:])


@pytest.mark.parametrize("overlay", [0, 3, 9])
def test_planes_and_rows_are_each_others_inverse(overlay: int) -> None:
    rows = np.random.default_rng(overlay).integers(0, 256, (2, 3, 7, 10)).astype(np.uint8)
    apart = planes_of_rows(rows, 4, overlay)
    assert apart.shape == rows.shape
    np.testing.assert_array_equal(rows_of_planes(apart, 4, overlay), rows)
    assert (apart != rows).any() == (overlay < 7)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_only_rows_that_are_rotated_have_planes(codec: Codec) -> None:
    if codec.is_rotated:
        assert field_bytes(codec, 64) == field_bytes(codec, 512) > 0
    else:
        with pytest.raises(ValueError, match="only those of codecs that rotate"):
            field_bytes(codec, 64)


@pytest.mark.parametrize(
    ("preset", "options", "reason"),
    [
        ("k8v4", Options(planes=True), "rows of fp8_e4m3 8 do not lie in planes"),
        ("int4", Options(planes=True, layers="0"), "rows of raw"),
        ("k5v3", Options(planes=True, equal_rows=True), "planes have no padded rows"),
        ("int4", Options(planes=True, spare_rows=True), "spare rows take whole rows"),
    ],
)
def test_what_planes_cannot_have_is_refused(
    preset: str, options: Options, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=reason):
        convert(original(DYNAMO), tmp_path / "model.onnx", preset=preset, options=options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["paged", "web"])
def test_other_targets_refuse_planes(name: str, tmp_path: Path) -> None:
    options = Options(planes=True, residual_length=0, sink_tokens=0)
    with pytest.raises(UsageError, match=f"the target {name} has no .* for codes and scales apart"):
        convert(original(DYNAMO), tmp_path / "model.onnx", options=options, target=target_of(name))


def test_rows_are_not_read_as_planes() -> None:
    rows, apart = (dict(load(model((0, 0), each)).model.metadata_props) for each in (False, True))
    assert plan_in(apart) is not None
    with pytest.raises(UnsupportedModelError, match="row layout"):
        plan_in({**apart, METADATA_DIGEST: rows[METADATA_DIGEST]})
