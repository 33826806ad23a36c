"""Layers with states under onnxruntime-genai's Engine: each request answers as it does alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

import onnxruntime_genai as og

from tests.conversion.test_raw import load_exact
from tests.decoders.hybrid import add_linear_attention
from tests.integrations.genai_folder import genai_config, write_config
from tests.serving.running import Tokens
from tests.serving.test_paged_engine import through_pages
from tests.targets.paged.test_states import PACKED_STATES
from tq_onnx.conversion.options import Options
from tq_onnx.files.load import load
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.plan import plan_in
from tq_onnx.targets.registry import target_of

REQUESTS, ALONE, NEW, PAGE, POSITIONS = 64, 8, 10, 16, 64
CODES = Options(residual_length=0, sink_tokens=0)

pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < PACKED_STATES,
    reason="ONNX Runtime has no GatedDeltaNet before 1.32",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of attention and one of linear attention, as Qwen3-Next."""
    folder = tmp_path_factory.mktemp("hybrid") / "original"
    folder.mkdir()
    model = load_exact("mobius-default")
    add_linear_attention(model)
    ir.save(model, folder / "model.onnx")
    sizes = {"layers": 3, "heads": 4, "kv_heads": 2, "head_size": 16, "vocabulary": 61}
    document = genai_config(**sizes, context=POSITIONS, eos=60, pad=0)
    document["model"]["type"] = "qwen3_next"
    document["model"]["decoder"]["inputs"]["position_ids"] = "position_ids"
    document["search"]["past_present_share_buffer"] = False
    write_config(folder, document)
    return folder


def prompts() -> list[Tokens]:
    """Half of them begin alike, with two pages."""
    rng = np.random.default_rng(4)
    begin = rng.integers(3, 60, 2 * PAGE).tolist()
    ends = [rng.integers(3, 60, count).tolist() for count in rng.integers(3, 20, REQUESTS)]
    return [begin + end if number % 2 else end for number, end in enumerate(ends)]


def by_generator(folder: Path, prompt: Tokens) -> Tokens:
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + NEW, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array([prompt], np.int32))
    answer: Tokens = []
    while not generator.is_done():
        generator.generate_next_token()
        answer.append(int(generator.get_next_tokens()[0]))
    return answer


def without_end(answer: Tokens) -> Tokens:
    return answer[:-1] if answer[-1:] == [60] else answer


@pytest.mark.parametrize("preset", ["raw", "int4"])
def test_requests_answer_as_each_alone(original: Path, preset: str, tmp_path: Path) -> None:
    contiguous, paged = (
        convert_folder(original, tmp_path / name, preset=preset, options=CODES, **more).output
        for name, more in (
            ("contiguous", {}),
            ("paged", {"target": target_of("paged", block_size=PAGE)}),
        )
    )
    answers, cached = through_pages(paged, prompts(), NEW, shares=True)
    assert sum(cached) >= PAGE
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert without_end(answer) == without_end(by_generator(contiguous, prompt))


def test_exact_tokens_in_pages_do_not_depend_on_other_requests(
    original: Path, tmp_path: Path
) -> None:
    target = target_of("paged", block_size=PAGE)
    paged = convert_folder(original, tmp_path / "paged", preset="int4", target=target).output
    plan = plan_in(load(paged / "model.onnx").model.metadata_props)
    assert plan is not None
    assert plan.page_window is not None
    few = prompts()[1 : ALONE + 1]
    together, cached = through_pages(paged, few, NEW, shares=True)
    assert sum(cached) >= PAGE
    for prompt, answer in zip(few, together, strict=True):
        assert through_pages(paged, [prompt], NEW, shares=False)[0] == [answer]


def test_the_configuration_names_what_each_layer_keeps(original: Path, tmp_path: Path) -> None:
    target = target_of("paged", block_size=PAGE)
    paged = convert_folder(original, tmp_path / "paged", preset="raw", target=target).output
    document = json.loads((paged / "genai_config.json").read_text())
    groups = {
        group["kind"]: group["layer_ids"] for group in document["model"]["decoder"]["state_groups"]
    }
    assert groups == {"paged_kv": [0, 1], "fixed_conv": [2], "fixed_recurrent": [2]}
    assert document["model"]["type"] == "qwen3_5_text"
    assert document["search"]["chunk_size"] == PAGE
