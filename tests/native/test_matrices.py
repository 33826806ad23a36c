"""A matrix of each KV head in place of one rotation: what rows mean, and what is refused."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from tests.native.conftest import Feeds
from tests.native.single_node import attention_model, encode_model, make_session
from tq_onnx.codec import reference
from tq_onnx.codec.acceptance import FIELD_STEPS, judge_rows
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import CODECS, Codec, row_layout

HEADS, SIZE, TOKENS = 3, 80, 40
FLOATS = 1e-5
"""Of the largest number: what products of floats lose."""

ROTATED = [codec for codec in CODECS if codec.is_rotated and not codec.has_sketch]
SPLIT = [codec for codec in CODECS if codec.is_split]


def matrices(codec: Codec, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What encoders and attention multiply with; of two classes no rotations."""
    rng = np.random.default_rng(seed)
    turns = np.linalg.qr(rng.standard_normal((HEADS, SIZE, SIZE)))[0]
    if not codec.is_split:
        return turns.astype(np.float32), turns.astype(np.float32)
    scales = rng.uniform(0.5, 2, (HEADS, SIZE, 1))
    return (scales * turns).astype(np.float32), (turns / scales).astype(np.float32)


def rows_of(session: ort.InferenceSession, codec: Codec, x: np.ndarray, turn: np.ndarray) -> Feeds:
    book = codebook_of(codec, SIZE)
    width = row_layout(codec, SIZE).row_bytes
    feeds = {
        "vectors": x,
        "past": np.zeros((len(x), HEADS, 0, width), np.uint8),
        "past_length": np.zeros(1, np.int64),
        "rotation": turn,
        "centroids": book.centroids,
        "boundaries": book.boundaries,
    }
    if any(each.name == "gains" for each in session.get_inputs()):
        feeds |= {"gains": gain_table(), "feedback": np.zeros(1, np.float32)}
    (found,) = session.run(None, feeds)
    return {**feeds, "rows": found}


@pytest.mark.parametrize("codec", ROTATED, ids=str)
def test_rows_and_attention_take_the_matrix_of_their_head(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "float")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, HEADS, TOKENS, SIZE)).astype(np.float32)
    encode, read = matrices(codec, 7)
    correction = UNBIASED if codec.corrects_norm else 0
    how = {"codec": codec.kind, "bits": codec.bits, "norm_correction": correction}
    made = rows_of(make_session(encode_model(search=codec.searches, **how)), codec, x, encode)
    gains = made.get("gains")
    book = codebook_of(codec, SIZE)
    tables = tables_of(codec, encode, book, correction, gains=gains)
    found = judge_rows(made["rows"], x, codec, tables)
    assert (found.wrong, found.steps <= FIELD_STEPS) == (0, True)
    query = rng.standard_normal((2, 2 * HEADS, 3, SIZE)).astype(np.float32)
    feeds = {
        "query": query,
        "key_cache": made["rows"],
        "value_cache": made["rows"],
        "past_length": np.array([TOKENS - 3]),
        "key_rotation": read,
        "key_centroids": book.centroids,
        "value_rotation": read,
        "value_centroids": book.centroids,
    }
    kinds = {"key_codec": codec.kind, "key_bits": codec.bits}
    kinds |= {"value_codec": codec.kind, "value_bits": codec.bits}
    (output,) = make_session(attention_model(scale=0.1, **kinds)).run(None, feeds)
    expected = reference.attention(
        *(query, made["rows"], made["rows"], feeds["past_length"]),
        **{"key": codec, "value": codec, "key_rotation": read, "key_codebook": book.centroids},
        **{"value_rotation": read, "value_codebook": book.centroids},
        **{"scale": 0.1, "causal": True},
    )
    assert np.abs(output - expected).max() <= FLOATS * np.abs(expected).max()


@pytest.mark.parametrize("codec", SPLIT, ids=str)
def test_scales_leave_the_grid_and_classes_are_empty(codec: Codec) -> None:
    first = codec.class_sizes(SIZE)[0]
    x = np.random.default_rng(3).standard_normal((1, HEADS, 8, SIZE)).astype(np.float32)
    x[:, :, 0] *= 1e6
    x[:, :, 1] *= 1e-6
    x[:, :, 2, :first] = 0
    x[:, :, 3, first:] = 0
    x[:, :, 4, 0] = np.nan
    x[:, :, 5, 1] = np.inf
    x[:, :, 6] = 0
    turn = np.tile(np.eye(SIZE, dtype=np.float32), (HEADS, 1, 1))
    how = {"codec": codec.kind, "bits": codec.bits, "norm_correction": UNBIASED}
    made = rows_of(make_session(encode_model(search=True, **how)), codec, x, turn)
    steps = made["rows"][0, 0, :, -2:]
    assert steps[0].tolist() == [255, 255]
    assert steps[[1, 4, 5, 6]].max() == 0
    assert [steps[2, 0], steps[3, 1]] == [0, 0]
    assert min(steps[2, 1], steps[3, 0]) > 1
    book = codebook_of(codec, SIZE)
    expected = reference.encode(x, codec, turn, book, UNBIASED, gains=made["gains"])
    assert np.array_equal(made["rows"], expected)


@pytest.mark.parametrize(
    ("codec", "shape", "says"),
    [
        (SPLIT[0], (HEADS + 1, SIZE, SIZE), r"rotation has shape \[4, 80, 80\], expected \[3, "),
        (SPLIT[0], (HEADS, SIZE, SIZE - 8), r"rotation has shape \[3, 80, 72\], expected \[3, 80"),
        (Codec("prod", 4), (HEADS, SIZE, 2 * SIZE), "rotation has"),
        (Codec("lloyd_max", 4), (1, HEADS, SIZE, SIZE), "rotation has"),
    ],
    ids=str,
)
def test_other_matrices_are_refused(codec: Codec, shape: tuple[int, ...], says: str) -> None:
    x = np.ones((1, HEADS, 1, SIZE), np.float32)
    how = {"codec": codec.kind, "bits": codec.bits, "norm_correction": 0}
    session = make_session(encode_model(search=codec.searches, **how))
    with pytest.raises(Exception, match=says):
        rows_of(session, codec, x, np.zeros(shape, np.float32))


def test_a_head_too_small_for_two_classes_is_refused() -> None:
    codec = SPLIT[0]
    session = make_session(
        encode_model(codec=codec.kind, bits=codec.bits, norm_correction=UNBIASED)
    )
    feeds = {
        "vectors": np.ones((1, 1, 1, 8), np.float32),
        "past": np.zeros((1, 1, 0, 40), np.uint8),
        "past_length": np.zeros(1, np.int64),
        "rotation": np.ones((1, 8, 8), np.float32),
        "centroids": np.zeros(codec.levels, np.float32),
        "boundaries": np.zeros(codec.boundaries, np.float32),
    }
    with pytest.raises(Exception, match="head size 8"):
        session.run(None, feeds)
