from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.models import DYNAMO, GENAI, HALF, converted, opened, original
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import CachePair
from tq_onnx.runtime.cache import as_array, bytes_per_token, cache_spec
from tq_onnx.runtime.session import make_session

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
