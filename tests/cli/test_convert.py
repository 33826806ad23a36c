from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import tq_onnx
from tests.cli.run import run
from tests.files.models import DYNAMO, GENAI, external, inline, snapshot
from tests.integrations.genai_folder import genai_folder
from tq_onnx.codec.spec import Codec, layout_digest
from tq_onnx.conversion.calibrationfile import write_calibration
from tq_onnx.files import oversize
from tq_onnx.plan import METADATA_DIGEST, METADATA_PRESET
from tq_onnx.quality.calibrate import calibrate


@pytest.mark.parametrize("fixture", [DYNAMO, GENAI])
def test_convert_writes_beside_the_input(tmp_path: Path, fixture: str) -> None:
    model = inline(tmp_path, fixture)
    before = snapshot(tmp_path)
    outcome = run("convert", model)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert "3.76 times smaller than float16, 7.53 than float32" in outcome.out
    assert "the newest 32 tokens and the first 4 in float16" in " ".join(outcome.out.split())
    assert f"tq-onnx verify {model} {tmp_path / 'model.int4.onnx'} --quick" in outcome.out
    after = snapshot(tmp_path)
    assert set(after) - set(before) == {"model.int4.onnx"}
    assert all(after[name] == digest for name, digest in before.items())
    properties = {p.key: p.value for p in onnx.load(tmp_path / "model.int4.onnx").metadata_props}
    assert properties[METADATA_PRESET] == "int4"
    assert properties[METADATA_DIGEST] == layout_digest(
        {Codec("lloyd_max", 4)}, has_window=True, has_planes=False
    )


def test_the_default_name_tells_the_preset(tmp_path: Path) -> None:
    assert run("convert", inline(tmp_path), "--preset", "int3").code == 0
    assert (tmp_path / "model.int3.onnx").exists()
    outcome = run("convert", tmp_path / "model.onnx", "--kv-cache-dtype", "turboquant_4bit_nc")
    assert outcome.code == 0
    assert tq_onnx.inspect(tmp_path / "model.4bit_nc.onnx").plan.preset == "4bit_nc"
    outcome = run("convert", tmp_path / "model.onnx", "--kv-cache-dtype", "q8_0")
    assert "a cache type of llama.cpp" in outcome.sentence(2)


def test_json_is_the_only_output(tmp_path: Path) -> None:
    model = inline(tmp_path)
    output = tmp_path / "out" / "small.onnx"
    outcome = run("convert", model, "-o", output, "--json", "--seed", 7, "--rotation", "hadamard")
    assert outcome.code == 0
    assert outcome.err == ""
    document = outcome.document
    assert document["output"] == str(output)
    assert document["bytes_per_token_before"] == 2 * 2 * 2 * 64 * 4
    assert document["bytes_per_token_after"] == 2 * 2 * 2 * 34
    assert document["plan"]["seed"] == 7
    assert document["plan"]["rotation"] == "hadamard"
    assert [layer["rotation_seed"] for layer in document["plan"]["layers"]] == [7, 1344]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    model = inline(tmp_path)
    for name in ("a.onnx", "b.onnx"):
        assert run("convert", model, "-o", tmp_path / name).code == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert run("convert", model, "-o", tmp_path / "c.onnx", "--seed", 43).code == 0
    assert (tmp_path / "a.onnx").read_bytes() != (tmp_path / "c.onnx").read_bytes()


def test_an_output_that_exists_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    model = inline(tmp_path)
    output = tmp_path / "model.int4.onnx"
    output.write_text("precious")
    before = snapshot(tmp_path)
    assert "--overwrite" in run("convert", model).sentence(4)
    assert snapshot(tmp_path) == before
    assert run("convert", model, "--overwrite").code == 0
    assert output.stat().st_size > 1000


def test_the_input_is_never_the_output(tmp_path: Path) -> None:
    model = external(tmp_path)
    (tmp_path / "link.onnx").symlink_to(model)
    before = snapshot(tmp_path)
    for output in (model, tmp_path / "model.onnx.data", tmp_path / "link.onnx"):
        sentence = run("convert", model, "-o", output, "--overwrite").sentence(4)
        assert "input" in sentence
    assert snapshot(tmp_path) == before


def test_a_second_conversion_is_refused(tmp_path: Path) -> None:
    assert run("convert", inline(tmp_path)).code == 0
    before = snapshot(tmp_path)
    assert "already" in run("convert", tmp_path / "model.int4.onnx").sentence(3)
    assert snapshot(tmp_path) == before


def test_an_unsupported_model_is_refused_by_layer(tmp_path: Path) -> None:
    model = inline(tmp_path)
    proto = onnx.load(model)
    for node in proto.graph.node:
        if node.op_type == "Softmax":
            node.op_type = "LogSoftmax"
    onnx.save(proto, model)
    before = snapshot(tmp_path)
    sentence = run("convert", model).sentence(3)
    assert "layer 0" in sentence
    assert str(model) in sentence
    assert snapshot(tmp_path) == before


def test_external_data_options(tmp_path: Path) -> None:
    model = external(tmp_path / "in")
    assert "nothing to copy" in run("convert", model, "--external-data", "copy").sentence(2)
    assert "copy or link" in run(
        "convert", model, "-o", tmp_path / "x" / "m.onnx", "--external-data", "keep"
    ).sentence(2)
    assert not (tmp_path / "x").exists()
    document = run("convert", model, "--json").document
    assert document["files"]["external_data"] == "keep"
    document = run("convert", model, "-o", tmp_path / "y" / "m.onnx", "--json").document
    assert document["files"]["external_data"] == "copy"
    assert document["files"]["data"] == [str(tmp_path / "y" / "model.onnx.data")]


def test_unknown_choices_are_bad_usage(tmp_path: Path) -> None:
    model = inline(tmp_path)
    for option in (["--preset", "int9"], ["--rotation", "none"], ["--external-data", "eat"]):
        assert run("convert", model, *option).code == 2


def test_options_of_layers_and_bits(tmp_path: Path) -> None:
    model = inline(tmp_path)
    outcome = run("convert", model, "--preset", "k8v4", "--layers", 1, "--bits-v", 3)
    assert outcome.code == 0, outcome.err
    assert "raw 32, 256 bytes a row in layer 0" in outcome.out
    assert "keys fp8_e4m3 8, values uniform 3, 64 and 28 bytes a row in layer 1" in outcome.out
    assert "rotation" not in outcome.out
    found = run("convert", model, "--json", "-o", tmp_path / "x.onnx", "--no-equalize").document
    assert [layer["equalised"] for layer in found["plan"]["layers"]] == [False, False]
    assert found["equalisation"] == []
    sentence = run("convert", model, "--boundary-layers", 1).sentence(2)
    assert "leave nothing to compress in a model of 2 layers" in sentence
    assert "have no" not in sentence
    assert "no form of 6 bits" in run("convert", model, "--bits-k", 6).sentence(2)
    assert "names no layers" in run("convert", model, "--layers", "all").sentence(2)
    assert run("convert", model, "--boundary-layers", -1).code == 2


def test_keys_that_are_too_uneven_are_told(tmp_path: Path) -> None:
    model = inline(tmp_path)
    proto = onnx.load(model)
    for tensor in proto.graph.initializer:
        if "_norm.weight" in tensor.name and list(tensor.dims) == [64]:
            # Equal for queries and keys, and only in their last pair: nothing to equalise.
            weight = np.ones(64, np.float32)
            weight[[31, 63]] = 16
            tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))
    onnx.save(proto, model)
    outcome = run("convert", model)
    assert outcome.code == 0, outcome.err
    assert "note: the keys of layers 0-1 are too uneven for lloyd_max 4" in outcome.out
    assert "--preset k8v4 is safer" in outcome.out
    outcome = run("inspect", model)
    assert "4-bit keys are unsafe in 2 of 2 layers" in outcome.out
    assert outcome.out.count(" unsafe ") >= 2
    assert "note" not in run("convert", model, "--preset", "k8v4").out


def test_a_calibration_file(tmp_path: Path) -> None:
    model, known = inline(tmp_path), tmp_path / "known.safetensors"
    statistics = calibrate(model, np.random.default_rng(0).integers(0, 97, 300), context=96)
    write_calibration(known, statistics)
    given = ("--calibration", known, "--overwrite")
    outcome = run("convert", model, *given)
    assert outcome.code == 0, outcome.err
    assert "of keys and values, kept once" in outcome.out
    assert "calibrated  " in outcome.out
    assert "tokens, for contexts of any length" in outcome.out
    small = model.with_name("model.int4-cal.onnx")
    for command in ("inspect", "fit"):
        assert "for contexts of any length" in run(command, small).out
        told = run(command, small, "--json").document["calibration"]
        assert (told["tokens"], told["context"]) == (statistics.tokens, 96)
    found = run("convert", model, *given, "--layers", 0, "--json").document["plan"]
    assert [layer["centered"] for layer in found["layers"]] == [True, False]
    assert "not between 0 and " in run("convert", model, *given, "--center-from", 99).sentence(2)
    told = run("convert", model, "--center-from", 2).sentence(2)
    assert told.endswith("; give --calibration, or leave --center-from out")
    few = replace(statistics, layers=statistics.layers[:1])
    write_calibration(known, few, overwrite=True)
    assert "1 layers, and the model has 2" in run("convert", model, *given).sentence(2)
    known.write_bytes(b"no safetensors")
    assert str(known) in run("convert", model, *given).sentence(4)


def test_two_presets_share_the_data_of_another_folder(tmp_path: Path) -> None:
    model = external(tmp_path / "in")
    for preset in ("int4", "int3"):
        output = tmp_path / "out" / f"{preset}.onnx"
        outcome = run("convert", model, "-o", output, "--preset", preset)
        assert outcome.code == 0, outcome.err
    assert set(snapshot(tmp_path / "out")) == {"int4.onnx", "int3.onnx", "model.onnx.data"}


def test_weights_that_move_out_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = inline(tmp_path)
    monkeypatch.setattr(oversize, "MAX_PROTOBUF_BYTES", model.stat().st_size * 9 // 10)
    # Without a window, whose function bodies take more room than these weights.
    outcome = run("convert", model, "--residual-length", 0, "--sink-tokens", 0)
    assert outcome.code == 0, outcome.err
    moved = tmp_path / "model.int4.onnx.data"
    assert f"{moved} holds weights" in outcome.out
    assert moved.exists()


def test_a_folder(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "qwen3")
    outcome = run("convert", source, "--preset", "int3")
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    out = tmp_path / "qwen3-int3"
    assert "model.onnx: 2 layers (gqa)" in outcome.out
    assert "model.onnx.data (copied)" in outcome.out
    assert "chat_template.jinja, tokenizer.json" in outcome.out
    assert "custom_ops_library = " in outcome.out
    assert f"tq-onnx verify {source} {out} --quick" in outcome.out
    assert outcome.out.count("note") == 1  # of the window that it does not have
    assert "--overwrite" in run("convert", source, "--preset", "int3").sentence(4)
    outcome = run("convert", source, "-o", out, "--overwrite", "--json")
    document = outcome.document
    assert document["output"] == str(out)
    assert [d["plan"]["preset"] for d in document["decoders"]] == ["int4"]
    assert document["genai"]["head_size"] == 34
    assert "original folder" in run("convert", out).sentence(3)


def test_a_folder_with_padding_and_several_widths(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "qwen3")
    outcome = run("convert", source, "--preset", "k5v3", "--layers", 1)
    assert outcome.code == 0, outcome.err
    # Two heads, five bits and three: 42 and 26 bytes.
    assert "32 bytes of each token are padding" in outcome.out
    assert "rows of several widths" in outcome.out
    assert "42 and 42 bytes a row in layer 1" in outcome.out


def test_a_folder_for_a_gpu(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "qwen3")
    config = source / "genai_config.json"
    document = json.loads(config.read_text())
    options = document["model"]["decoder"]["session_options"]
    options["provider_options"] = [{"cuda": {}}]
    document["search"]["past_present_share_buffer"] = False
    config.write_text(json.dumps(document))
    out = run("convert", source).out
    assert "asks for cuda, and the library has kernels for the CPU only" in out
    assert "past_present_share_buffer may be set to true" in out
    assert "exact tokens take the last 144 rows of max_length" in " ".join(out.split())


def test_folders_that_are_refused(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in")
    assert "copy or link" in run("convert", source, "--external-data", "keep").sentence(2)
    assert "overlaps" in run("convert", source, "-o", source).sentence(4)
    (source / "model.onnx").unlink()
    assert "names model.onnx" in run("convert", source).sentence(4)
    (source / "genai_config.json").unlink()
    assert "there is no ONNX file in this folder (it has chat_template.jinja" in run(
        "convert", source
    ).sentence(4)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_help_fits_a_screen_and_help_all_has_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    brief, lines = (run("convert", flag).out.splitlines() for flag in ("--help", "--help-all"))
    assert len(brief) <= 45
    options = [found[1] for line in brief if (found := re.match(r" +(?:-\w, )?(--[\w-]+)", line))]
    first = ["--output", "--preset", "--calibrate", "--target", "--overwrite"]
    assert options == [*first, "--help-all", "--help"]
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100
    groups = [line.rstrip(":") for line in lines if line.endswith(":") and line[:1].isalpha()]
    assert groups == [
        "Output",
        "Codec",
        "Calibration",
        "Target",
        "Exact tokens",
        "Layers",
        "Other",
    ]
    at = {name: lines.index(f"{name}:") for name in groups}
    for option, group, after in (
        ("--output", "Output", "Codec"),
        ("--preset", "Codec", "Calibration"),
        ("--center-from", "Calibration", "Target"),
        ("--max-positions", "Target", "Exact tokens"),
        ("--sink-tokens", "Exact tokens", "Layers"),
        ("--boundary-layers", "Layers", "Other"),
    ):
        (line,) = (n for n, line in enumerate(lines) if re.match(rf" +(-o, )?{option}\b", line))
        assert at[group] < line < at[after]
