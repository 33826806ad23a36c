from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.runtime.models import CONVERTIBLE, DYNAMO, EAGER, GENAI, converted, ids, opened
from tq_onnx.errors import ModelFileError, UnsupportedModelError, UsageError
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.plan import METADATA_DIGEST, METADATA_PLAN, Interface
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.session import make_session
from tq_onnx.runtime.signature import plan_of

KINDS = ("original", "kernel", "body")
ALL = [(name, kind) for name in CONVERTIBLE for kind in KINDS]
# What may be bound with room to spare.
FIXED = [(name, kind) for name, kind in ALL if kind != "original" or name == GENAI]


def caches(decoder: Decoder) -> list[np.ndarray]:
    return [decoder.cache(index) for index in range(len(decoder.signature.caches))]


def same_bytes(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))


def close(some: Any, others: Any) -> None:
    np.testing.assert_allclose(some, others, rtol=0, atol=2e-5)


def first_tie(some: list[np.ndarray], others: list[np.ndarray]) -> int:
    """The token of the one row that may differ: calls of another size round differently."""
    rows = [token for a, b in zip(some, others, strict=True) for token in np.nonzero(a != b)[2]]
    assert len(set(rows)) <= 1
    return min(rows, default=some[0].shape[2])


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_chunks_and_steps_agree_with_the_whole(name: str, kind: str) -> None:
    tokens = ids(24)
    whole = opened(name, kind).decoder()
    logits = whole.prefill(tokens)
    assert logits.shape == (1, 24, 97)
    assert whole.length == 24
    chunked = opened(name, kind).decoder()
    in_chunks = chunked.prefill(tokens, chunk=7)
    stepped = opened(name, kind).decoder()
    in_steps = np.stack([stepped.step(tokens[:, position]) for position in range(24)], axis=1)
    for decoder, found in ((chunked, in_chunks), (stepped, in_steps)):
        alike = 24 if kind == "original" else first_tie(caches(whole), caches(decoder))
        assert alike > 5
        close(found[:, :alike], logits[:, :alike])
    assert whole.cache_bytes == chunked.cache_bytes == 24 * whole.signature.bytes_per_token


@pytest.mark.parametrize(("name", "kind"), FIXED)
@pytest.mark.parametrize("capacity", [24, 40])
def test_fixed_capacity_agrees_with_growing(name: str, kind: str, capacity: int) -> None:
    tokens = ids(24, seed=1)
    growing = opened(name, kind).decoder()
    fixed = opened(name, kind).decoder(capacity=capacity)
    for start, stop in ((0, 11), (11, 12), (12, 20), (20, 24)):
        np.testing.assert_array_equal(
            fixed.prefill(tokens[:, start:stop]), growing.prefill(tokens[:, start:stop])
        )
    assert same_bytes(caches(growing), caches(fixed))
    assert fixed.cache_bytes == capacity * fixed.signature.bytes_per_token


def test_in_place_means_one_buffer() -> None:
    decoder = opened(DYNAMO, "kernel").decoder(capacity=8)
    before = [value.data_ptr() for value in decoder._caches.past]
    decoder.prefill(ids(4))
    decoder.step([1])
    assert [value.data_ptr() for value in decoder._caches.past] == before
    swapped = opened(DYNAMO, "body").decoder(capacity=8)
    before = [value.data_ptr() for value in swapped._caches.past]
    swapped.prefill(ids(4))
    assert not set(before) & {value.data_ptr() for value in swapped._caches.past}


def test_growing_caches_take_turns_in_two_buffers() -> None:
    decoder = opened(DYNAMO, "kernel").decoder()
    seen: list[set[int]] = []
    for _ in range(6):
        decoder.step([1])
        seen.append({value.data_ptr() for value in decoder._caches.past})
    assert not seen[0] & seen[1]
    assert seen == [seen[0], seen[1]] * 3


@pytest.mark.parametrize("steps", [1, 2])
def test_a_call_that_fails_leaves_growing_caches_as_they_were(steps: int) -> None:
    decoder, other = (opened(DYNAMO, "kernel").decoder() for _ in range(2))
    for token in range(steps):
        decoder.step([token])
        other.step([token])
    with pytest.raises(UnsupportedModelError):
        decoder.step([1 << 40])
    assert same_bytes(caches(decoder), caches(other))
    for token in range(4):
        np.testing.assert_array_equal(decoder.step([token]), other.step([token]))
    assert same_bytes(caches(decoder), caches(other))


@pytest.mark.parametrize(("name", "kind"), FIXED)
def test_a_full_cache_is_one_sentence_and_keeps_what_it_holds(name: str, kind: str) -> None:
    decoder = opened(name, kind).decoder(capacity=10)
    decoder.prefill(ids(8))
    before = caches(decoder)
    with pytest.raises(UsageError, match=r"11 tokens do not fit .* capacity of 10"):
        decoder.prefill(ids(3))
    assert decoder.length == 8
    assert same_bytes(before, caches(decoder))
    decoder.prefill(ids(2))
    assert decoder.length == 10


@pytest.mark.parametrize("name", [DYNAMO, EAGER])
def test_an_original_that_counts_by_its_caches_can_only_grow(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="only grow"):
        opened(name, "original").decoder(capacity=32)


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, k in ALL if n != GENAI])
def test_left_padding_changes_nothing_for_the_others(name: str, kind: str) -> None:
    tokens = ids(16, seed=2)
    padded = np.concatenate([np.zeros((1, 5), np.int64), tokens[:, :11]], axis=1)
    batch = np.concatenate([padded, tokens])
    mask = np.ones_like(batch)
    mask[0, :5] = 0
    decoder = opened(name, kind).decoder(batch=2)
    logits = decoder.prefill(batch, mask)
    following = decoder.step([3, 4])
    pieces = opened(name, kind).decoder(batch=2)
    close(pieces.read(batch, mask, most=4), logits[:, -1])  # the first one is padding only
    close(pieces.step([3, 4]), following)
    for row, prompt, token in ((0, tokens[:, :11], 3), (1, tokens, 4)):
        alone = opened(name, kind).decoder()
        close(logits[row, -prompt.shape[1] :], alone.prefill(prompt)[0])
        close(following[row], alone.step([token])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rewound_batch_keeps_its_padding(kind: str) -> None:
    batch = ids(12, batch=2, seed=4)
    mask = np.ones_like(batch)
    mask[0, :5] = 0
    decoder = opened(DYNAMO, kind).decoder(batch=2)
    decoder.prefill(batch, mask)
    expected = decoder.step([3, 4])
    decoder.step([5, 6])
    decoder.rewind(12)
    close(decoder.step([3, 4]), expected)


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_batches_of_equal_length(name: str, kind: str) -> None:
    batch = ids(12, batch=3, seed=3)
    decoder = opened(name, kind).decoder(batch=3)
    logits = decoder.prefill(batch)
    following = decoder.step([1, 2, 3])
    for row in range(3):
        alone = opened(name, kind).decoder()
        close(logits[row], alone.prefill(batch[row : row + 1])[0])
        close(following[row], alone.step([row + 1])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_refused_where_positions_cannot_be_given(kind: str) -> None:
    mask = np.ones((2, 6), np.int64)
    mask[0, 0] = 0
    with pytest.raises(UnsupportedModelError, match="no padded batches"):
        opened(GENAI, kind).decoder(batch=2).prefill(ids(6, batch=2), mask)


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        ([[0, 0, 0], [0, 0, 0]], None, "not \\[1, 1 or more\\]"),
        ([[]], None, "not \\[1, 1 or more\\]"),
        ([0, 0, 0], None, "not \\[1, 1 or more\\]"),
        ([[0, 0, 0]], np.ones((1, 4)), "attention mask has shape"),
        ([[0, 0, 0]], [[1, 1, 0]], "on the left"),
        ([[0, 0, 0]], [[1, 0, 1]], "on the left"),
        ([[0, 0, 0]], [[0.5, 1, 1]], "other numbers than 0 and 1"),
        ([[0, -1]], None, "a token id must be at least 0, got -1"),
        ([[0.5]], None, "tokens must be whole numbers, got type float64"),
        ([[True]], None, "tokens must be whole numbers, got type bool"),
        ([[2**70]], None, "tokens must be whole numbers, got type object"),
        (np.array([[2**63]]), None, "a token id must be at least 0, got -"),
        ([[1, 2], [3]], None, "several lengths"),
    ],
)
def test_prompts_that_are_none(tokens: Any, mask: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened(DYNAMO, "kernel").decoder().prefill(tokens, mask)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, 2**31, 2**70])
def test_a_capacity_must_hold_something(capacity: int) -> None:
    with pytest.raises(UsageError, match="context must be"):
        opened(DYNAMO, "kernel").decoder(capacity=capacity)


@pytest.mark.parametrize("capacity", [None, 20])
def test_steps_that_are_none(capacity: int | None) -> None:
    decoder = opened(DYNAMO, "kernel").decoder(capacity=capacity)
    for tokens in ([], [1, 2], [-1], [1.0], ["a"]):
        with pytest.raises(UsageError):
            decoder.step(tokens)
    with pytest.raises(UsageError, match="length must be"):
        decoder.rewind(0.0)  # type: ignore[arg-type]
    assert decoder.length == 0


@pytest.mark.parametrize("capacity", [None, 20])
def test_reset_forgets_everything(capacity: int | None) -> None:
    decoder = opened(DYNAMO, "kernel").decoder(capacity=capacity)
    first = decoder.prefill(ids(9))
    decoder.step([5])
    decoder.reset()
    assert decoder.length == 0
    np.testing.assert_array_equal(decoder.prefill(ids(9)), first)


def test_an_input_that_nothing_fills_is_refused() -> None:
    found = opened(DYNAMO, "kernel")
    blind = replace(found.signature, interface=Interface("input_ids", None, None, "logits"))
    with pytest.raises(UnsupportedModelError, match="attention_mask, position_ids"):
        Decoder(found.session, blind)


def test_tokens_must_be_integers() -> None:
    found = opened(DYNAMO, "kernel")
    names = replace(found.signature.interface, tokens="no_such_input")
    with pytest.raises(UnsupportedModelError):
        Decoder(found.session, replace(found.signature, interface=names))


def test_a_failure_inside_onnxruntime_is_one_sentence() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        opened(DYNAMO, "original").decoder().prefill(np.full((1, 4), 10_000))
    assert "\n" not in str(caught.value)
    assert "Non-zero status code" not in str(caught.value)


def test_watched_outputs_are_those_of_the_last_call() -> None:
    probe = expose_internals(converted(DYNAMO))
    decoder = probe.decoder(library=True, threads=1, exact=True)
    plain = opened(DYNAMO, "kernel").decoder()
    for tokens in (ids(5), ids(1)):
        np.testing.assert_array_equal(decoder.prefill(tokens), plain.prefill(tokens))
        assert decoder.watched[probe.layers[0].query].shape == (1, 4, tokens.shape[1], 64)
    assert same_bytes(caches(decoder), caches(plain))


class _Meta:
    def __init__(self, **metadata: str) -> None:
        self.custom_metadata_map = metadata


class _Session:
    def __init__(self, text: str, **metadata: str) -> None:
        self._meta = _Meta(**{METADATA_PLAN: text}, **metadata)

    def get_modelmeta(self) -> _Meta:
        return self._meta


def test_plans_come_from_the_metadata() -> None:
    plan = plan_of(make_session(converted(DYNAMO), library=False, threads=1))
    assert plan is not None
    assert plan.preset == "int4"
    assert plan_of(opened(DYNAMO, "original").session) is None
    with pytest.raises(ModelFileError, match="metadata cannot be read"):
        plan_of(_Session("{"))  # type: ignore[arg-type]
    other = replace(plan, layout_digest="0123456789abcdef")
    with pytest.raises(UnsupportedModelError, match="0123456789abcdef"):
        plan_of(_Session(other.to_json()))  # type: ignore[arg-type]
    zeros = {METADATA_DIGEST: "0" * 16}
    with pytest.raises(UnsupportedModelError, match=r"tq_onnx.layout_digest is '0000"):
        plan_of(_Session(plan.to_json(), **zeros))  # type: ignore[arg-type]
