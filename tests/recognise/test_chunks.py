"""Recurrences whose graph has the step of one chunk of tokens: calls are no longer than it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import CACHES, PRESENTS, TOKENS, decoder
from tests.recognise.test_passthrough import MASK, STATE, first_prompt, recurrent
from tests.recognise.test_soundness import BODY, EXACT, MERGED
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import UsageError
from tq_onnx.recognise.match import recognise
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import generate
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_model
from tq_onnx.verification.verify import verify

CHUNK, TEXT = 8, 20

RECURRENCE = """chunk = Constant<value_ints = [8]>()
        remainder = Mod(new, chunk)
        missing = Sub(chunk, remainder)
        gap = Mod(missing, chunk)
        none = Constant<value_ints = [0, 0, 0, 0, 0, 0]>()
        pads = Concat<axis = 0>(none, gap, zero_1)
        in_chunks = Constant<value_ints = [0, 0, -1, 8, 16]>()
        joined = Constant<value_ints = [0, 0, -1, 16]>()
        padded = Pad(q, pads)
        chunks = Reshape(padded, in_chunks)
        rows = Gather<axis = 2>(chunks, zero)
        k_t = Transpose<perm = [0, 1, 3, 2]>(rows)
        products = MatMul(rows, k_t)
        lower = Trilu<upper = 0>(products)
        within = MatMul(lower, rows)
        before = MatMul(rows, past_state)
        outer = MatMul(k_t, rows)
        present_state = Add(past_state, outer)
        of_chunk = Add(within, before)
        of_first = Unsqueeze(of_chunk, two)
        every = Mul(chunks, nothing)
        of_chunks = Add(every, of_first)
        flat = Reshape(of_chunks, joined)
        small = Constant<value_float = 0.01>()
        scaled = Mul(flat, small)
        kept_rows = Slice(scaled, zero_1, new, third)
        r1 = Transpose<perm = [0, 2, 1, 3]>(kept_rows)
        r2 = Reshape(r1, merged_shape)
        o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, merged_shape)
        merged = Add(o2, r2)
"""


def chunked(body: str = RECURRENCE) -> ir.Model:
    """Linear attention as an exporter writes it that has followed a call of one chunk."""
    return decoder(
        BODY.replace(MERGED, body),
        inputs=MASK + STATE + CACHES,
        outputs=f"float[B, 2, 16, 16] present_state, {PRESENTS}",
    )


def call_tokens(model: ir.Model) -> int | None:
    recognition = recognise(model)
    assert recognition.misses == ()
    assert recognition.interface is not None
    return recognition.interface.call_tokens


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The original and its conversion."""
    folder = tmp_path_factory.mktemp("chunked")
    paths = folder / "original.onnx", folder / "converted.onnx"
    ir.save(chunked(), paths[0])
    convert(*paths, preset="raw")
    return paths


def text() -> np.ndarray:
    return np.random.default_rng(0).integers(3, TOKENS, (1, TEXT))


def steps(decoder: Decoder) -> np.ndarray:
    return np.stack([decoder.step([token]) for token in text()[0]], axis=1)


def test_the_tokens_of_a_call_are_those_of_a_chunk() -> None:
    assert call_tokens(chunked()) == CHUNK
    assert call_tokens(recurrent()) is None
    assert call_tokens(first_prompt()) is None


def test_a_size_that_does_not_come_from_the_tokens_is_no_chunk() -> None:
    fixed = chunked(RECURRENCE.replace("Mod(new, chunk)", "Mod(one, chunk)"))

    assert call_tokens(fixed) is None


def test_prompts_are_read_in_calls_that_are_computed_right(files: tuple[Path, Path]) -> None:
    for model in map(open_model, files):
        expected = steps(model.decoder())
        bound = EXACT * np.abs(expected).max()
        reading = model.decoder()

        np.testing.assert_allclose(model.decoder().prefill(text()), expected, atol=bound)
        last = reading.read(text(), most=TEXT)
        np.testing.assert_allclose(last, expected[:, -1], atol=bound)
        assert [call.stop - call.start for call in reading.calls(TEXT)] == [8, 8, 4]
        assert np.abs(in_one_call(model) - expected).max() > 1e3 * bound


def in_one_call(model: OpenModel) -> np.ndarray:
    """Logits of the graph by itself: those of the first chunk, again and again."""
    unlimited = replace(model.signature.interface, call_tokens=None)
    signature = replace(model.signature, interface=unlimited)
    return replace(model, signature=signature).decoder().prefill(text())


def test_generate_reads_long_prompts_so(files: tuple[Path, Path]) -> None:
    answers = []
    for model in map(open_model, files):
        stepping = model.decoder()
        logits, answer = steps(stepping)[:, -1], []
        for _ in range(4):
            answer.append(int(logits.argmax()))
            logits = stepping.step(answer[-1:])
        result = generate(model.decoder(), text()[0].tolist(), max_new_tokens=4)
        assert list(result.tokens) == answer
        answers.append(answer)
    assert answers[0] == answers[1]


def test_verify_reads_the_text_so_and_says_it(files: tuple[Path, Path]) -> None:
    report = verify(*files, 64, source="", context=64, new_tokens=4, threads=1)

    assert report.holds, report.checks
    assert report.quality is not None
    assert report.quality.kl_max < EXACT
    (warning,) = report.warnings
    assert "original.onnx fails or computes wrong logits for calls of more than 8 tokens" in warning


def test_a_graph_for_first_prompts_takes_one_chunk(tmp_path: Path) -> None:
    body = RECURRENCE.replace("before = MatMul(rows, past_state)\n", "").replace(
        "present_state = Add(past_state, outer)", "present_state = Identity(outer)"
    )
    body = body.replace("Add(within, before)", "Identity(within)")
    first = decoder(
        BODY.replace(MERGED, body)
        .replace("old = Shape<start = 2, end = 3>(past_key)", "old = Identity(zero_1)")
        .replace("Concat<axis = 2>(past_key, k)", "Identity(k)")
        .replace("Concat<axis = 2>(past_value, v)", "Identity(v)"),
        inputs=MASK,
        outputs=f"float[B, 2, 16, 16] present_state, {PRESENTS}",
    )
    ir.save(first, tmp_path / "prefill.onnx")
    ir.save(chunked(), tmp_path / "decode.onnx")
    prefill, decode = (open_model(tmp_path / f"{name}.onnx") for name in ("prefill", "decode"))

    assert prefill.longest == CHUNK
    with pytest.raises(UsageError, match=r"9 tokens were given.*more than 8 in a call wrong"):
        prefill.decoder().prefill(text()[:, : CHUNK + 1])
    expected = steps(decode.decoder())
    pair = decode.decoder(first=prefill)
    np.testing.assert_allclose(pair.prefill(text()), expected, atol=EXACT * np.abs(expected).max())
