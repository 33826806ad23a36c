"""Two graphs of fixed sizes in one folder: written, run and verified as one model, on the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cli.run import Outcome, run
from tests.runtime.models import DYNAMO, original
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.runtime.opening import open_converted

CAPACITY, TOKENS = 96, 16
TO_GRAPHS = ("--target", "cann-graph", "--capacity", CAPACITY)
SHORT = ("--tokens", 64, "--context", 32, "--new-tokens", 6)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bundled("dynamo", tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module")
def graphs(exported: Path) -> Path:
    folder = exported.with_name("graphs")
    outcome = run("convert", exported, *TO_GRAPHS, "--call-tokens", TOKENS, "-o", folder)
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of two layers, beside its graphs: the time of ``verify`` grows with both."""
    path = tmp_path_factory.mktemp("small") / "model.onnx"
    shutil.copyfile(original(DYNAMO), path)
    options = (*TO_GRAPHS, "--call-tokens", TOKENS, "-o", path.with_name("graphs"))
    assert run("convert", path, *options).code == 0
    return path


def verify(exported: Path, graph: Path) -> Outcome:
    return run("verify", exported, graph, *SHORT, "--json")


def failed(outcome: Outcome) -> list[str]:
    assert outcome.code == 5
    return [check["name"] for check in outcome.document["report"]["checks"] if not check["holds"]]


def tokens_of(path: Path) -> int:
    (ids,) = (value for value in onnx.load(path).graph.input if value.name == "input_ids")
    return int(ids.type.tensor_type.shape.dim[1].dim_value)


def test_what_is_written(exported: Path, graphs: Path) -> None:
    names = {entry.name for entry in graphs.iterdir()}
    assert names >= {"decode.onnx", "prompt.onnx", "tokenizer.json", "config.json"}
    assert "model.onnx.data" not in names
    assert (tokens_of(graphs / "decode.onnx"), tokens_of(graphs / "prompt.onnx")) == (1, TOKENS)


def test_by_default_prompts_go_in_pieces_of_128(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    outcome = run("convert", exported, "--target", "cann-graph", "-o", folder, "--json")
    assert outcome.code == 0, outcome.err
    assert [Path(one["output"]).name for one in outcome.document["decoders"]] == [
        "decode.onnx",
        "prompt.onnx",
    ]
    assert tokens_of(folder / "prompt.onnx") == 128


def test_both_read_a_prompt(graphs: Path) -> None:
    """As long as there are tokens for it, the wide one; what it left the other goes on with."""
    ids = np.random.default_rng(0).integers(0, 250, (1, 2 * TOKENS + 5))
    model = open_converted(graphs / "decode.onnx")
    assert model.wide is not None
    together = model.decoder()
    pieces = [piece.stop - piece.start for piece in together.calls(ids.shape[1])]
    assert pieces == [TOKENS, TOKENS, 1, 1, 1, 1, 1]
    (graphs / "alone").mkdir()
    shutil.copy(graphs / "decode.onnx", graphs / "alone" / "step.onnx")
    alone = open_converted(graphs / "alone" / "step.onnx")
    assert alone.wide is None
    steps = alone.decoder()
    np.testing.assert_allclose(together.prefill(ids), steps.prefill(ids), atol=1e-4)
    for index in range(len(together.signature.caches)):
        np.testing.assert_array_equal(together.cache(index), steps.cache(index))
    np.testing.assert_allclose(together.step([7]), steps.step([7]), atol=1e-4)


def test_generate_takes_the_folder(exported: Path, graphs: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.onnx"
    convert(exported, plain, options=Options(gains=False, residual_length=0, sink_tokens=0))
    asked = ("--prompt", "It was the best of times", "--max-new-tokens", 12, "--json")
    ours = run("generate", graphs, *asked)
    assert ours.code == 0, ours.err
    theirs = run("generate", plain, *asked, "--no-library", "--tokenizer", exported.parent)
    assert ours.document["tokens"] == theirs.document["tokens"]
    assert (ours.document["capacity"], ours.document["converted"]) == (CAPACITY, True)


def test_verify_holds(exported: Path, graphs: Path) -> None:
    outcome = verify(exported, graphs)
    assert (outcome.code, outcome.err) == (0, "")
    report = outcome.document["report"]
    assert [check["name"] for check in report["checks"]] == [
        "decode.onnx is the conversion of the original",
        "prompt.onnx is the conversion of the original",
        "the graph computes what its conversion with operators does",
    ]
    assert 0 < report["quality"]["kl_mean"] < 0.01


@pytest.mark.parametrize("name", ["decode.onnx", "prompt.onnx"])
def test_verify_finds_another_weight(small: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(small.with_name("graphs"), tmp_path / "spoilt")
    model = onnx.load(folder / name)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    array = numpy_helper.to_array(weight).copy()
    array[0, 0] += 1e-3
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, folder / name)
    assert f"{name} is the conversion of the original" in failed(verify(small, folder))


def test_verify_finds_another_node(small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small.with_name("graphs"), tmp_path / "spoilt")
    model = onnx.load(folder / "decode.onnx")
    node = [node for node in model.graph.node if node.op_type == "Add"][-1]
    node.op_type = "Sub"
    onnx.save(model, folder / "decode.onnx")
    outcome = run("verify", small, folder, *SHORT)
    assert outcome.code == 5
    assert "FAILED  decode.onnx is the conversion of the original" in outcome.out
    assert "NOT verified" in outcome.out


def test_what_cannot_be_made_again_is_not_verified(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "graph.onnx"
    assert run("convert", small, *TO_GRAPHS, "--layers", 1, "-o", output).code == 0
    told = run("verify", small, output, *SHORT).sentence(3)
    assert "cannot be made again from the plan alone" in told
    assert told.endswith("verify the same conversion without --target")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--capacity", 64), "the capacity is 64, and that of decode.onnx 96"),
        (("--preset", "int3"), "were not converted alike in the caches of layer 0"),
    ],
)
def test_graphs_that_do_not_belong_together(
    exported: Path, graphs: Path, tmp_path: Path, options: tuple[object, ...], told: str
) -> None:
    folder = shutil.copytree(graphs, tmp_path / "mixed")
    (folder / "prompt.onnx").unlink()
    output = ("-o", folder / "prompt.onnx")
    more = (*TO_GRAPHS, "--call-tokens", TOKENS, *options, *output)
    assert run("convert", exported, *more).code == 0
    assert told in run("generate", folder, "--prompt", "It was").sentence(2)


def test_a_refusal_leaves_nothing(exported: Path, tmp_path: Path) -> None:
    """There is room for a step, and none for a piece of a prompt."""
    folder = tmp_path / "graphs"
    options = ("--target", "cann-graph", "--capacity", 20)
    assert "no room for 128 tokens" in run("convert", exported, *options, "-o", folder).sentence(2)
    assert not folder.exists()


def test_a_folder_that_exists(exported: Path, graphs: Path) -> None:
    options = (*TO_GRAPHS, "-o", graphs)
    assert "the output folder exists" in run("convert", exported, *options).sentence(4)
    told = run("convert", exported, *options, "--external-data", "copy").sentence(2)
    assert "have their weights in them" in told


def test_other_models_are_no_graphs(exported: Path) -> None:
    """Where the provider is missing, that is said first."""
    outcome = run("generate", exported, "--prompt", "x", "--ep", "cann-graph")
    assert outcome.code in (3, 4)
    assert "cann-graph" in outcome.err or "CANNExecutionProvider" in outcome.err
