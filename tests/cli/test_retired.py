"""Words of earlier versions: one sentence says what to type instead."""

from __future__ import annotations

from typing import Final

import pytest

from tests.cli.run import run
from tq_onnx.cli.retired import RETIRED

TYPED: Final = {
    "verify-on-npu": ("verify-on-npu", "-o", "report.json"),
    "--expand-weights": ("convert", "model.onnx", "--target", "cann", "--expand-weights=float16"),
    "ort-gqa": ("convert", "model.onnx", "--calibrate", "--target", "ort-gqa"),
    "--kv-cache-bit-width": ("convert", "model.onnx", "--kv-cache-bit-width", 4),
    "cann-graph": ("verify", "model.onnx", "new.onnx", "--ep", "cann-graph"),
    "--speculate": ("chat", "model.onnx", "--speculate", "ngram"),
    "view": ("view", "model.onnx"),
    **{
        option: ("report", "model.onnx", "new.onnx", option)
        for option in (
            "--peers",
            "--no-peers",
            "--card",
            "--generation",
            "--outliers",
            "--markdown",
        )
    },
}


@pytest.mark.parametrize("word", RETIRED)
def test_a_word_of_the_past_is_refused_with_what_replaced_it(word: str) -> None:
    assert f"{word} was removed; {RETIRED[word]}" in run(*TYPED[word]).sentence(2)
