"""``convert --target``: the files that it writes, and what it refuses; no wheel is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest

from tests.cli.run import run
from tests.files.models import snapshot
from tests.integrations.genai_folder import bundled_genai
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.ops.domain import DOMAIN, GATHER, ROTARY_EMBEDDING
from tq_onnx.plan import METADATA_PLAN, Plan


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return build_bundled("dynamo", tmp_path)


def tables(model: Path) -> set[tuple[int, ...]]:
    """Shapes of the tables of the rotary embedding."""
    graph = onnx.load(model, load_external_data=False).graph
    shapes = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    nodes = [n for n in graph.node if n.domain == DOMAIN and n.op_type == ROTARY_EMBEDDING]
    return {shapes[name] for node in nodes for name in node.input[1:3]}


def test_writes_a_model_for_cann_beside_the_input(exported: Path) -> None:
    before = snapshot(exported.parent)
    outcome = run("convert", exported, "--target", "cann")
    assert outcome.code == 0, outcome.err
    assert "every floating-point node on CANNExecutionProvider" in outcome.out
    output = exported.with_name("model.signed4-cann.onnx")
    assert set(snapshot(exported.parent)) - set(before) == {output.name}
    model = onnx.load(output, load_external_data=False)
    assert {(f.domain, f.name) for f in model.functions} >= {(DOMAIN, GATHER)}
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert Plan.from_json(metadata[METADATA_PLAN]).target == "cann"
    positions = json.loads((exported.parent / "config.json").read_text())["max_position_embeddings"]
    assert tables(output) == {(positions, 64)}


def test_a_folder_of_genai_has_no_exact_tokens_for_cann(tmp_path: Path) -> None:
    source = bundled_genai(tmp_path / "in", "genai")
    outcome = run("convert", source, "--target", "cann")
    assert outcome.code == 0, outcome.err
    told = "exact tokens  none: --target cann has none in folders; a converted .onnx file has them"
    assert told in outcome.out
    asked = ("--residual-length", 8, "--overwrite")
    refused = run("convert", source, "--target", "cann", *asked).sentence(2)
    assert "convert with --residual-length 0 and --sink-tokens 0, or convert for" in refused
    asked = ("--residual-length", 32, "--sink-tokens", 4)
    file = run("convert", source / "model.onnx", "--target", "cann", *asked)
    assert re.search("exact tokens +the newest 32 tokens", file.out)


def test_holds_on_the_cpu_too(exported: Path) -> None:
    output = exported.with_name("cann.onnx")
    assert run("convert", exported, "--target", "cann", "-o", output).code == 0
    outcome = run("verify", exported, output, "--tokens", 64)
    assert outcome.code == 0, outcome.out + outcome.err


def test_as_many_positions_as_asked(exported: Path) -> None:
    output = exported.with_name("short.onnx")
    outcome = run("convert", exported, "--target", "cann", "--max-positions", 96, "-o", output)
    assert outcome.code == 0, outcome.err
    assert tables(output) == {(96, 64)}


@pytest.mark.parametrize("told", ["", "{", '{"max_position_embeddings": -1}', "[]"])
def test_positions_without_a_configuration(exported: Path, told: str) -> None:
    (exported.parent / "config.json").write_text(told)
    output = exported.with_name("default.onnx")
    assert run("convert", exported, "--target", "cann", "-o", output).code == 0
    assert tables(output) == {(32_768, 64)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--preset", "prod4"), "the target cann has no kernels for caches of prod 4"),
        (("--preset", "k8v4"), "only for lloyd_max or uniform_signed"),
        (("--boundary-layers", "1"), "layer 0: rows of raw 32 do not lie in planes"),
        (
            ("--preset", "int4", "--boundary-layers", "1"),
            "the target cann has no kernels for caches of raw",
        ),
        (("--max-positions", "2000000"), "2000000 positions are not between 1 and 1,048,576"),
    ],
)
def test_refusals(exported: Path, options: tuple[str, ...], sentence: str) -> None:
    before = snapshot(exported.parent)
    assert sentence in run("convert", exported, "--target", "cann", *options).sentence(2)
    assert snapshot(exported.parent) == before


def test_sizes_are_for_their_targets_only(exported: Path) -> None:
    outcome = run("convert", exported, "--max-positions", 64)
    assert "that only a model for --target cann has" in outcome.sentence(2)


def test_writes_few_standard_operators(exported: Path) -> None:
    before = snapshot(exported.parent)
    outcome = run("convert", exported, "--target", "web")
    assert outcome.code == 0, outcome.err
    output = exported.with_name("model.int4-web.onnx")
    assert set(snapshot(exported.parent)) - set(before) == {output.name}
    assert "standard operators only, for onnxruntime-web" in outcome.out
    assert f"tq-onnx verify {exported} {output} --quick" in outcome.out
    model = onnx.load(output, load_external_data=False)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}
    assert '"target": "web"' in run("inspect", output, "--json").out
    assert "TurboQuant caches already" in run("convert", output).sentence(3)


def test_a_folder_for_javascript(tmp_path: Path) -> None:
    exported = build_bundled("dynamo", tmp_path / "exported")
    folder = tmp_path / "web"
    outcome = run("convert", exported.parent, "--target", "web", "-o", folder)
    assert outcome.code == 0, outcome.err
    assert (folder / "tokenizer.json").is_file()
    assert not onnx.load(folder / "model.onnx", load_external_data=False).functions


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--preset", "k8v4"), "the target web has no graph for caches of fp8"),
        (("--boundary-layers", "1"), "the target web has no graph for caches of raw"),
        (("--residual-length", "8"), "the target web has no graph for exact tokens"),
    ],
)
def test_refusals_for_javascript(exported: Path, options: tuple[str, ...], sentence: str) -> None:
    before = snapshot(exported.parent)
    assert sentence in run("convert", exported, "--target", "web", *options).sentence(2)
    assert snapshot(exported.parent) == before
