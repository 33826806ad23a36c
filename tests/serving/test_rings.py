"""Caches that hold the newest tokens of sliding windows, under onnxruntime-genai.

Its model builder makes them by default where layers have sliding windows (Gemma 2, gpt-oss).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

import onnxruntime_genai as og

from tests.agreement.harness import agreement
from tests.agreement.tolerances import allowed
from tests.integrations.genai_folder import bundled_genai
from tests.serving.running import Tokens, uneven_prompts
from tests.serving.test_paged_engine import through_pages
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.targets.registry import target_of

WINDOW, SLACK, NEW = 8, 2, 24
RINGS = (0, 2)
"""Layers with windows, between others, as in Gemma."""


def with_rings(folder: Path) -> Path:
    """The bundled model as the builder writes one with sliding windows."""
    path = bundled_genai(folder, "genai")
    model = ir.load(path / "model.onnx")
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    for layer in RINGS:
        node = attentions[layer]
        for name, number in (("local_window_size", WINDOW), ("sliding_window_cache", 1)):
            node.attributes[name] = ir.AttrInt64(name, number)
        for name, caches in (("past", node.inputs[3:5]), ("present", node.outputs[1:3])):
            for cache in caches:
                assert cache is not None and cache.shape is not None
                cache.shape = ir.Shape([*cache.shape[:2], f"{name}_sliding", cache.shape[3]])
    ir.save(model, path / "model.onnx")
    config = path / "genai_config.json"
    document = json.loads(config.read_text(encoding="utf-8"))
    document["model"]["decoder"]["sliding_window"] = {
        "window_size": WINDOW,
        "slide_key_value_cache": False,
        "slide_inputs": False,
        "layers": [*RINGS],
        "cache_slack": SLACK,
    }
    config.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_rings(tmp_path_factory.mktemp("rings") / "original")


def answers(folder: Path, prompts: list[Tokens], pieces: int = 0) -> list[Tokens]:
    model, found = og.Model(str(folder)), []
    for prompt in prompts:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=len(prompt) + NEW, do_sample=False)
        generator = og.Generator(model, parameters)
        size = pieces or len(prompt)
        for start in range(0, len(prompt), size):
            generator.append_tokens(np.array(prompt[start : start + size], np.int32))
        answer: Tokens = []
        while not generator.is_done():
            generator.generate_next_token()
            answer.append(int(generator.get_next_tokens()[0]))
        found.append(answer)
    return found


@pytest.mark.parametrize("pieces", [0, 5])
def test_texts_beyond_the_window_are_those_of_the_original(
    original: Path, pieces: int, tmp_path: Path
) -> None:
    prompts = uneven_prompts(6)
    converted = convert_folder(original, tmp_path / "converted", preset="raw").output
    expected = answers(original, prompts, pieces)
    assert answers(converted, prompts, pieces) == expected
    assert answers(bundled_genai(tmp_path / "without", "genai"), prompts, pieces) != expected


def test_requests_in_pages_answer_as_the_original_alone(original: Path, tmp_path: Path) -> None:
    prompts = uneven_prompts(12)
    target = target_of("paged", block_size=16)
    paged = convert_folder(original, tmp_path / "paged", preset="raw", target=target).output
    found, _ = through_pages(paged, prompts, NEW, shares=True)
    assert found == answers(original, prompts)


def test_our_own_loop_runs_the_original(original: Path) -> None:
    found = agreement(original / "model.onnx", "raw", library=True)
    assert found.refusal == "" and {"prompt", "chunks", "in place"} <= set(found.figures)
    assert found.worst <= allowed(found, "raw"), found.figures
