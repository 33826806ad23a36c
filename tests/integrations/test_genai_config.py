from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.files.models import DYNAMO, GENAI, inline
from tests.integrations.genai_folder import genai_config, write_config
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.errors import ModelFileError, UnsupportedModelError
from tq_onnx.integrations.genai import (
    GenaiChanges,
    check_config,
    patch_config,
    read_config,
)
from tq_onnx.plan import CachePair, Plan

LIBRARY = "libtq_onnx_ops.so"
SIZES = {"layers": 2, "heads": 4, "kv_heads": 2, "head_size": 64, "vocabulary": 97}


NO_WINDOW = Options(residual_length=0, sink_tokens=0)


@pytest.fixture
def document() -> dict[str, Any]:
    return genai_config(**SIZES)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return prepare(inline(tmp_path_factory.mktemp("plan"), GENAI), options=NO_WINDOW).plan


def patched(
    folder: Path, document: dict[str, Any], plans: dict[str, Plan]
) -> tuple[dict[str, Any], GenaiChanges]:
    write_config(folder, document)
    config = read_config(folder)
    assert config is not None
    text, changes = patch_config(config, plans, LIBRARY)
    return json.loads(text), changes


def test_three_entries_change_and_nothing_else(
    tmp_path: Path, document: dict[str, Any], plan: Plan
) -> None:
    document["model"]["ключ"] = ["kept", {"as": "it is"}]
    document["model"]["decoder"]["session_options"]["intra_op_num_threads"] = 3
    before = copy.deepcopy(document)
    after, changes = patched(tmp_path, document, {"model.onnx": plan})
    assert changes == GenaiChanges(LIBRARY, 34, True, True, False, ())
    decoder = before["model"]["decoder"]
    decoder["session_options"]["custom_ops_library"] = LIBRARY
    decoder["head_size"] = 34
    assert after == before
    assert list(after) == list(before)
    assert list(after["model"]) == list(before["model"])


SLIDING = {"window_size": 4, "slide_key_value_cache": False, "slide_inputs": False, "layers": [0]}


def test_layers_with_windows_get_caches_of_all_tokens(
    tmp_path: Path, document: dict[str, Any], plan: Plan
) -> None:
    document["model"]["decoder"]["sliding_window"] = SLIDING
    after, _ = patched(tmp_path, document, {"model.onnx": plan})
    assert "sliding_window" not in after["model"]["decoder"]


@pytest.mark.parametrize("name", ["slide_inputs", "slide_key_value_cache"])
def test_inputs_and_caches_that_slide_are_refused(
    tmp_path: Path, document: dict[str, Any], name: str
) -> None:
    for sliding in ({**SLIDING, name: True}, {k: v for k, v in SLIDING.items() if k != name}):
        document["model"]["decoder"]["sliding_window"] = sliding
        write_config(tmp_path, document)
        config = read_config(tmp_path)
        assert config is not None
        with pytest.raises(UnsupportedModelError, match=f"sliding_window.{name}"):
            check_config(config)


def test_caches_that_must_grow_are_not_shared(
    tmp_path: Path, document: dict[str, Any], plan: Plan
) -> None:
    growing = replace(plan, fixed_capacity=False)
    after, changes = patched(tmp_path, document, {"model.onnx": growing})
    assert after["search"]["past_present_share_buffer"] is False
    assert (changes.share_buffer_before, changes.share_buffer) == (True, False)
    assert not changes.may_share


def test_exact_tokens_change_no_length(
    tmp_path: Path, document: dict[str, Any], plan: Plan
) -> None:
    exact = replace(plan, recent=16, sinks=4)
    after, changes = patched(tmp_path, document, {"model.onnx": exact})
    plain, _ = patched(tmp_path, document, {"model.onnx": plan})
    assert after == plain
    assert changes.spare_rows == 20 * 4


def test_what_may_be_shared_is_told_and_not_done(
    tmp_path: Path, document: dict[str, Any], plan: Plan
) -> None:
    document["search"]["past_present_share_buffer"] = False
    after, changes = patched(tmp_path, document, {"model.onnx": plan})
    assert after["search"]["past_present_share_buffer"] is False
    assert changes.may_share
    del document["search"]
    after, changes = patched(tmp_path, document, {"model.onnx": plan})
    assert "search" not in after
    assert (changes.share_buffer, changes.may_share) == (None, False)


def test_rows_of_several_widths(tmp_path: Path, document: dict[str, Any], plan: Plan) -> None:
    first, second = plan.layers
    wide = second.with_caches(row_bytes=66)
    after, changes = patched(
        tmp_path, document, {"model.onnx": replace(plan, layers=(first, wide))}
    )
    assert after["model"]["decoder"]["head_size"] == 64
    assert changes.head_size is None
    odd = replace(second, value=replace(second.value, row_bytes=66))
    with pytest.raises(UnsupportedModelError, match="layer 1 has key rows of 34 bytes and value"):
        patched(tmp_path, document, {"model.onnx": replace(plan, layers=(first, odd))})


def test_providers_stay_and_are_told(tmp_path: Path, document: dict[str, Any], plan: Plan) -> None:
    options = [{"cuda": {"enable_cuda_graph": "0"}}, {"CPU": {}}, {"dml": {}}]
    document["model"]["decoder"]["session_options"]["provider_options"] = options
    after, changes = patched(tmp_path, document, {"model.onnx": plan})
    assert after["model"]["decoder"]["session_options"]["provider_options"] == options
    assert changes.providers == ("cuda", "dml")


@pytest.mark.parametrize(
    ("other", "rightly"),
    [
        ({}, True),
        ({"right_padding": False}, False),
        # The Engine answers nothing at all: it gives a mask, and takes no hybrids.
        ({"right_padding": False, "attention_mask": None}, True),
        ({"right_padding": False, "states": (CachePair("past.0.conv", "present.0.conv"),)}, True),
    ],
)
def test_graphs_whose_uneven_batches_go_wrong_are_told(
    tmp_path: Path, document: dict[str, Any], plan: Plan, other: dict[str, Any], rightly: bool
) -> None:
    changed = replace(plan, interface=replace(plan.interface, **other))
    _, changes = patched(tmp_path, document, {"model.onnx": plan, "other.onnx": changed})
    assert changes.uneven_batches is rightly


def test_without_session_options_they_are_made(
    tmp_path: Path, document: dict[str, Any], plan: Plan
) -> None:
    del document["model"]["decoder"]["session_options"]
    after, _ = patched(tmp_path, document, {"model.onnx": plan})
    assert after["model"]["decoder"]["session_options"] == {"custom_ops_library": LIBRARY}


def test_a_pipeline(tmp_path: Path, document: dict[str, Any], plan: Plan) -> None:
    decoder = document["model"]["decoder"]
    del decoder["filename"]
    decoder["pipeline"] = [
        {"embed": {"filename": "embed.onnx", "session_options": {}}},
        {"layers": {"filename": "layers.onnx", "session_options": {"log_id": "x"}}},
    ]
    document["model"]["vision"] = {"filename": "vision.onnx"}
    write_config(tmp_path, document)
    config = read_config(tmp_path)
    assert config is not None
    assert config.decoders == ("embed.onnx", "layers.onnx")
    assert config.others == ("vision.onnx",)
    after, _ = patched(tmp_path, document, {"layers.onnx": plan})
    embed, layers = after["model"]["decoder"]["pipeline"]
    assert embed["embed"]["session_options"] == {}
    assert layers["layers"]["session_options"]["custom_ops_library"] == LIBRARY


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("inputs.past_key_names", "past.%d.key"),
        ("outputs.present_value_names", "present.value"),
        ("outputs.logits", "scores"),
    ],
)
def test_names_that_the_model_does_not_have(
    tmp_path: Path, document: dict[str, Any], plan: Plan, entry: str, name: str
) -> None:
    side, key = entry.split(".")
    document["model"]["decoder"][side][key] = name
    with pytest.raises(UnsupportedModelError, match=f"{entry} is {name}, and the model has "):
        patched(tmp_path, document, {"model.onnx": plan})


def test_another_library_is_in_the_way(tmp_path: Path, document: dict[str, Any]) -> None:
    write_config(tmp_path, document)
    config = read_config(tmp_path)
    assert config is not None
    check_config(config)
    document["model"]["decoder"]["session_options"]["custom_ops_library"] = "ext.so"
    write_config(tmp_path, document)
    config = read_config(tmp_path)
    assert config is not None
    with pytest.raises(UnsupportedModelError, match=r"already \(ext\.so\)"):
        check_config(config)


def test_no_configuration(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None


def of_decoder(more: str) -> str:
    return f'{{"model": {{"decoder": {{"filename": "m", {more}}}}}}}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSON"),
        ("[]", "does not describe"),
        ('{"model": {}}', "does not describe"),
        ('{"model": {"decoder": {}}}', "names no file"),
        ('{"model": {"decoder": []}}', "does not describe"),
        ('{"model": {"decoder": {"filename": "../m.onnx"}}}', "not in the folder"),
        ('{"model": {"decoder": {"filename": "/m.onnx"}}}', "not in the folder"),
        ('{"model": {"decoder": {"filename": "C:\\\\m.onnx"}}}', "not in the folder"),
        ('{"model": {"decoder": {"filename": "m", "pipeline": [[1]]}}}', "does not describe"),
        ('{"model": {"decoder": {"filename": "m\\u0000"}}}', "not in the folder"),
        (of_decoder('"session_options": null'), "does not describe"),
        (of_decoder('"session_options": {"provider_options": [[7]]}'), "does not describe"),
        (
            of_decoder('"pipeline": [{"a": {"filename": "m", "session_options": [1]}}]'),
            "does not describe",
        ),
        (of_decoder('"x": "\\ud800"'), "JSON"),
        (of_decoder('"x": 1e999'), "JSON"),
        (of_decoder('"x": NaN'), "JSON"),
        (of_decoder(f'"x": {"[" * 70}{"]" * 70}'), "JSON"),
    ],
)
def test_damaged_configurations(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "genai_config.json").write_text(text)
    with pytest.raises(ModelFileError, match=reason):
        read_config(tmp_path)


def test_a_graph_without_token_counts_is_another_matter(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    """Decomposed attention counts by the attention mask: shared buffers become possible."""
    plan = prepare(inline(tmp_path, DYNAMO), options=NO_WINDOW).plan
    document["search"]["past_present_share_buffer"] = False
    _, changes = patched(tmp_path, document, {"model.onnx": plan})
    assert changes.may_share is plan.fixed_capacity
