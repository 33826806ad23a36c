from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.cli.run import run
from tests.files.models import DYNAMO, GENAI, external, inline, snapshot
from tests.integrations.genai_folder import genai_folder
from tq_onnx import __version__
from tq_onnx.codec.presets import COMMON_PRESETS, LISTED_PRESETS, PRESETS
from tq_onnx.codec.spec import Codec, layout_digest, row_layout
from tq_onnx.plan import METADATA_DIGEST


@pytest.mark.parametrize("fixture", [DYNAMO, GENAI])
def test_an_original(tmp_path: Path, fixture: str) -> None:
    model = external(tmp_path, fixture)
    before = snapshot(tmp_path)
    document = run("inspect", model, "--json").document
    assert document["convertible"] is True
    assert document["plan"] is None
    assert document["misses"] == []
    assert [found["layer"] for found in document["layers"]] == [0, 1]
    for found in document["layers"]:
        assert (found["num_heads"], found["kv_num_heads"], found["head_size"]) == (4, 2, 64)
        assert found["scale"] == pytest.approx(0.125)
    assert document["bytes_per_token"] == 2 * 2 * 2 * 64 * 4
    offers = {offer["preset"]: offer for offer in document["presets"]}
    assert list(offers) == [preset.name for preset in LISTED_PRESETS]
    for name, offer in offers.items():
        rows = [
            row_layout(codec, 64).row_bytes for codec in (PRESETS[name].key, PRESETS[name].value)
        ]
        assert offer["bytes_per_token"] == 2 * 2 * sum(rows)
        assert offer["ratio"] == pytest.approx(document["bytes_per_token"] / (2 * 2 * sum(rows)))
    outcome = run("inspect", model)
    assert outcome.code == 0
    assert outcome.err == ""
    assert f"next: tq-onnx convert {model}" in outcome.out
    assert "3.76" in outcome.out
    assert snapshot(tmp_path) == before


def test_half_precision_counts_half(tmp_path: Path) -> None:
    model = inline(tmp_path, "dynamo-op18-sdpa-hd128-fp16")
    document = run("inspect", model, "--json").document
    assert document["presets"][0]["preset"] == "int4"
    assert document["presets"][0]["ratio"] == pytest.approx(256 / 66)


def test_a_layout_digest_that_is_not_the_plans(tmp_path: Path) -> None:
    model = inline(tmp_path)
    assert run("convert", model).code == 0
    converted = tmp_path / "model.int4.onnx"
    proto = onnx.load(converted)
    entry = next(one for one in proto.metadata_props if one.key == METADATA_DIGEST)
    entry.value = "0" * 16
    converted.write_bytes(proto.SerializeToString())
    says = "tq_onnx.layout_digest is '0000000000000000'"
    assert says in run("inspect", converted).sentence(3)
    assert says in run("verify", model, converted, "--tokens", 16).sentence(5)


def test_a_converted_model(tmp_path: Path) -> None:
    model = inline(tmp_path)
    assert run("convert", model, "--preset", "int3", "--seed", 5).code == 0
    converted = tmp_path / "model.int3.onnx"
    document = run("inspect", converted, "--json").document
    assert document["convertible"] is False
    assert document["plan"]["preset"] == "int3"
    assert document["plan"]["seed"] == 5
    assert document["plan"]["tool_version"] == __version__
    assert document["bytes_per_token"] == 2 * 2 * 2 * 26
    outcome = run("inspect", converted)
    assert outcome.code == 0
    for text in (
        "int3",
        "seed 5",
        layout_digest({Codec("lloyd_max", 3)}, has_window=True, has_planes=False),
        "the newest 32 tokens",
        __version__,
        "208 bytes",
    ):
        assert text in outcome.out


def test_near_misses_are_printed_and_the_code_is_3(tmp_path: Path) -> None:
    model = inline(tmp_path)
    proto = onnx.load(model)
    softmax = [node for node in proto.graph.node if node.op_type == "Softmax"]
    softmax[1].op_type = "LogSoftmax"
    onnx.save(proto, model)
    outcome = run("inspect", model)
    assert outcome.code == 3
    assert outcome.err == ""
    assert "cannot be converted" in outcome.out
    assert "layer 1" in outcome.out
    outcome = run("inspect", model, "--json")
    assert outcome.code == 3
    assert outcome.document["convertible"] is False
    assert [miss["layer"] for miss in outcome.document["misses"]] == [1]


def test_metadata_that_lies_is_refused(tmp_path: Path) -> None:
    assert run("convert", inline(tmp_path)).code == 0
    converted = tmp_path / "model.int4.onnx"
    proto = onnx.load(converted)
    for text in ("{}", "[]", "not json", '{"layers": 3}', '{"layers": [{}], "interface": {}}'):
        for entry in proto.metadata_props:
            if entry.key == "tq_onnx.plan":
                entry.value = text
        onnx.save(proto, converted)
        assert "metadata" in run("inspect", converted).sentence(4)


def test_names_of_strangers_are_not_terminal_commands(tmp_path: Path) -> None:
    model = inline(tmp_path)
    proto = onnx.load(model)
    for node in proto.graph.node:
        if node.op_type == "Softmax":
            node.op_type = "LogSoftmax"
            node.name = "\x1b]0;owned\x07[red]x[/red]"
    onnx.save(proto, model)
    outcome = run("inspect", model)
    assert "\x1b" not in outcome.out
    assert "\x1b" not in run("convert", model).err


def test_a_folder(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    (source / "old.safetensors").write_text("x")
    before = snapshot(tmp_path)
    outcome = run("inspect", source)
    assert outcome.code == 0, outcome.err
    assert f"{source / 'model.onnx'}: opset" in outcome.out
    assert "model.onnx.data" in outcome.out
    assert "old.safetensors: weights that no ONNX file here reads" in outcome.out
    assert outcome.out.count("next: ") == 1
    assert f"next: tq-onnx convert {source}" in outcome.out
    document = run("inspect", source, "--json").document
    assert document["convertible"] is True
    assert [(m["name"], m["role"]) for m in document["models"]] == [("model.onnx", "decoder")]
    assert document["genai"] is True
    assert snapshot(tmp_path) == before
    assert run("convert", source).code == 0
    outcome = run("inspect", tmp_path / "in-int4")
    assert outcome.code == 0
    assert "model.onnx: converted" in outcome.out
    assert "next" not in outcome.out


def test_a_folder_that_cannot_be_converted(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in", DYNAMO)
    proto = onnx.load(source / "model.onnx", load_external_data=False)
    for node in proto.graph.node:
        if node.op_type == "Softmax":
            node.op_type = "LogSoftmax"
    (source / "model.onnx").write_bytes(proto.SerializeToString())
    outcome = run("inspect", source)
    assert outcome.code == 3
    assert "It cannot be converted" in outcome.out
    assert run("inspect", source, "--json").document["convertible"] is False
    (tmp_path / "empty").mkdir()
    assert "no ONNX file" in run("inspect", tmp_path / "empty").sentence(4)


def test_equal_layers_are_one_row_and_common_presets_are_shown(tmp_path: Path) -> None:
    model = inline(tmp_path)

    def first_words(*options: str) -> list[str]:
        lines = run("inspect", model, *options).out.splitlines()
        return [line.split()[0] for line in lines if line.strip()]

    words = first_words()
    assert words.count("0-1") == 1
    assert [word for word in words if word in PRESETS] == list(COMMON_PRESETS)
    assert [word for word in first_words("--all") if word in PRESETS] == [
        preset.name for preset in LISTED_PRESETS
    ]
