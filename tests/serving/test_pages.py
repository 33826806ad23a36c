"""onnxruntime-genai's Engine on caches in pages answers what the Generator answers without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tq_onnx.conversion.options import Options
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.targets.registry import target_of

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from tests.integrations.genai_folder import bundled_genai
from tests.serving.running import Alone, answered, uneven_prompts

NEW = 16


@pytest.mark.parametrize(("route", "block_size"), [("genai", 16), ("dynamo", 128)])
def test_requests_join_and_leave(route: str, block_size: int, tmp_path: Path) -> None:
    """24 requests, of which the pages hold some at a time; caches lose nothing."""
    folder = bundled_genai(tmp_path / "original", route)
    plain = convert_folder(
        folder, tmp_path / "plain", preset="raw", options=Options(residual_length=0, sink_tokens=0)
    )
    target = target_of(
        "paged", block_size=block_size, num_blocks=480 // block_size, max_batch_size=5
    )
    paged = convert_folder(folder, tmp_path / "paged", preset="raw", target=target)
    prompts = uneven_prompts(24)
    alone = Alone(plain.output)
    answers = answered(paged.output, prompts, NEW, together=True)
    assert answers == [alone.answer(prompt, NEW) for prompt in prompts]
