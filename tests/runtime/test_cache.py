from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.agreement.harness import agreement
from tests.recognise.test_passthrough import recurrent
from tests.runtime.models import DYNAMO, GENAI, HALF, converted, ids, opened, original
from tq_onnx.codec.planes import field_bytes, planes_of_rows, rows_of_planes
from tq_onnx.codec.spec import CODECS, Codec
from tq_onnx.conversion.inspect import inspect
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.files.load import load
from tq_onnx.plan import METADATA_DIGEST, CachePair, plan_in
from tq_onnx.runtime.cache import as_array, bytes_per_token, cache_spec
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.opening import open_model, open_original
from tq_onnx.runtime.session import make_session
from tq_onnx.targets.registry import target_of

PAIR = CachePair("past_key_values.1.value", "present.1.value")


@pytest.mark.parametrize(
    ("name", "kind", "type_name", "row", "per_token"),
    [
        (DYNAMO, "original", "float32", 64, 2 * 64 * 4),
        (GENAI, "original", "float32", 64, 2 * 64 * 4),
        (HALF, "original", "float16", 128, 2 * 128 * 2),
        (DYNAMO, "kernel", "uint8", 34, 2 * 34),
        (HALF, "kernel", "uint8", 66, 2 * 66),
    ],
)
def test_specs_come_from_the_session(
    name: str, kind: str, type_name: str, row: int, per_token: int
) -> None:
    specs = opened(name, kind).signature.caches
    assert len(specs) == 4
    assert [spec.pair.past for spec in specs[:2]] == [
        "past_key_values.0.key",
        "past_key_values.0.value",
    ]
    for spec in specs:
        assert (spec.type_name, spec.kv_num_heads, spec.row) == (type_name, 2, row)
        assert spec.bytes_per_token == per_token
    assert bytes_per_token(specs) == 4 * per_token == opened(name, kind).signature.bytes_per_token


@pytest.mark.parametrize("kind", ["original", "kernel"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_buffers_are_zeroed_and_of_the_promised_size(kind: str, tokens: int) -> None:
    spec = opened(DYNAMO, kind).signature.caches[0]
    value = spec.allocate(3, tokens)
    array = as_array(value)
    assert array.shape == (3, 2, tokens, spec.row)
    assert not array.any()
    assert value.tensor_size_in_bytes() == 3 * tokens * spec.bytes_per_token == array.nbytes


def test_the_view_is_the_buffer() -> None:
    value = opened(DYNAMO, "kernel").signature.caches[0].allocate(1, 4)
    as_array(value)[...] = 7
    assert (np.asarray(value.numpy()) == 7).all()


@pytest.mark.parametrize(
    "pair", [CachePair("nowhere", PAIR.present), CachePair(PAIR.past, "nowhere")]
)
def test_a_cache_that_is_not_there(pair: CachePair) -> None:
    session = make_session(converted(DYNAMO), library=False, threads=1)
    with pytest.raises(UnsupportedModelError, match="nowhere: the model has no such cache"):
        cache_spec(session, pair, kv_num_heads=2, head_size=64)


def test_an_input_that_is_no_cache() -> None:
    session = make_session(original(DYNAMO), library=False, threads=1)
    with pytest.raises(UnsupportedModelError, match="int64"):
        cache_spec(session, CachePair("input_ids", "logits"), kv_num_heads=2, head_size=64)


# Decoders hand the states of recurrent layers from call to call, as they do with caches.


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "model.onnx"
    ir.save(recurrent(), path)
    return path


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("preset", ["raw", "int4"])
def test_a_hybrid_is_fed_its_states(hybrid: Path, preset: str) -> None:
    found = agreement(hybrid, preset, library=True)

    # This state depends on where calls end, so that sequences one by one are no reference.
    del found.figures["batch"]
    assert found.refusal == ""
    assert found.worst <= 1e-5
    assert {"chunks", "in place"} <= set(found.figures)


def test_states_matter_and_are_forgotten(hybrid: Path) -> None:
    decoder = open_original(hybrid, threads=1).decoder()
    first, again = decoder.prefill([[5, 6, 7]]), decoder.prefill([[5, 6, 7]])
    decoder.reset()

    assert np.abs(first - again).max() > 1e-2
    assert np.array_equal(decoder.prefill([[5, 6, 7]]), first)


def test_inspect_names_them(hybrid: Path) -> None:
    assert inspect(hybrid).states == ("present_state",)


def test_bytes_per_token_count_what_grows(hybrid: Path) -> None:
    assert open_original(hybrid, threads=1).signature.bytes_per_token == 2 * 2 * 16 * 4


# Caches whose codes and fields lie apart hold the bytes of rows, elsewhere.


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
