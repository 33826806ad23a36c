"""What the configuration of a folder says of caches in pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.files.models import GENAI, inline
from tests.integrations.genai_folder import genai_config
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.conversion.ports import PACKED_DIMS
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.integrations.genaipages import page_config
from tq_onnx.plan import CachePair, Plan
from tq_onnx.targets.registry import target_of

SIZES = {"layers": 2, "heads": 4, "kv_heads": 2, "head_size": 64, "vocabulary": 97}


@pytest.fixture
def document() -> dict[str, Any]:
    return genai_config(**SIZES, context=1000)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    model = inline(tmp_path_factory.mktemp("plan"), GENAI)
    return prepare(model, preset="k8v4", target=target_of("paged", block_size=48)).plan


def test_the_engine_is_told_its_sizes(document: dict[str, Any], plan: Plan) -> None:
    sizes = page_config(document, {"model.onnx": plan}, {"max_batch_size": 3}, "here")
    decoder = document["model"]["decoder"]
    assert document["engine"] == {
        "dynamic_batching": {
            "block_size": 48,
            "num_blocks": 3 * 21,
            "max_batch_size": 3,
            "max_scheduled_tokens": 2048,
        }
    }
    assert decoder["head_size"] == plan.layers[0].key.row_bytes == plan.layers[1].value.row_bytes
    assert sizes.bytes == 3 * 21 * 48 * plan.bytes_per_token
    assert decoder["inputs"] == {
        "input_ids": "input_ids",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
        **{name: name for name in PACKED_DIMS},
    }


def test_pages_of_long_contexts_are_those_of_usual_texts(plan: Plan) -> None:
    for context, batch, blocks in ((40_000, 16, 16 * 86), (40_000, 2, 834), (480, 4, 40)):
        document = genai_config(**SIZES, context=context)
        values = {"max_batch_size": batch}
        assert page_config(document, {"model.onnx": plan}, values, "here").blocks == blocks


def test_pages_that_are_asked_for(document: dict[str, Any], plan: Plan) -> None:
    assert page_config(document, {"model.onnx": plan}, {"num_blocks": 7}, "here").blocks == 7


def test_layers_without_caches_are_told_apart(document: dict[str, Any], plan: Plan) -> None:
    document["model"]["decoder"]["num_hidden_layers"] = 4
    page_config(document, {"model.onnx": plan}, {}, "here")
    decoder = document["model"]["decoder"]
    assert decoder["state_groups"] == [{"kind": "paged_kv", "layer_ids": [0, 1]}]
    assert "chunk_size" not in document["search"]

    states = CachePair("past_key_values.2.conv_state", "present.2.conv_state")
    stateful = replace(plan, interface=replace(plan.interface, states=(states,)))
    page_config(document, {"model.onnx": stateful}, {}, "here")
    conv = {"kind": "fixed_conv", "layer_ids": [2]}
    assert decoder["state_groups"] == [{"kind": "paged_kv", "layer_ids": [0, 1]}, conv]
    assert decoder["inputs"]["past_conv_names"] == "past_key_values.%d.conv_state"
    assert document["search"]["chunk_size"] == plan.block_size

    unnamed = replace(plan.interface, states=(CachePair("memory", "present.memory"),))
    with pytest.raises(UnsupportedModelError, match="memory is the input of no layer"):
        page_config(document, {"model.onnx": replace(plan, interface=unnamed)}, {}, "here")


def test_what_the_engine_cannot_make_is_refused(document: dict[str, Any], plan: Plan) -> None:
    first, second = plan.layers
    uneven = replace(plan, layers=(first, replace(second, kv_num_heads=1)))
    with pytest.raises(UnsupportedModelError, match="1 or 2 heads"):
        page_config(document, {"model.onnx": uneven}, {}, "here")
    with pytest.raises(UnsupportedModelError, match="a pipeline of several models"):
        page_config(document, {"one.onnx": plan, "other.onnx": plan}, {}, "here")
    del document["model"]["context_length"], document["search"]["max_length"]
    with pytest.raises(UsageError, match="give `num_blocks`"):
        page_config(document, {"model.onnx": plan}, {}, "here")
