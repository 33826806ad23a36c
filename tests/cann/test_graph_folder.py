"""``--ep cann-graph`` in the real wheel: two graphs of one folder, the CPU behind CANN's parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.graph_engine import GraphEngine
from tests.cann.session import CANN
from tests.cli.run import run
from tq_onnx.integrations.bundled import build_bundled

pytestmark = pytest.mark.cann

EP = ("--ep", "cann-graph")
TEXT = "It was the best of times, it was the worst of times"
PIECE, NEW, CACHES = 16, 12, 8


@pytest.fixture(scope="module", params=["dynamo", "genai"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An original, and the folder with its graphs."""
    exported = build_bundled(request.param, tmp_path_factory.mktemp(request.param))
    folder = exported.with_name("graphs")
    options = ("--target", "cann-graph", "--capacity", 128, "--call-tokens", PIECE)
    outcome = run("convert", exported, *options, "-o", folder)
    assert outcome.code == 0, outcome.err
    return [exported, folder]


def test_generate(fake: FakeAcl, pair: list[Path]) -> None:
    asked = ("generate", pair[1], "--prompt", TEXT, "--max-new-tokens", NEW, "--json")
    engine = GraphEngine()
    fake.set_delay(200)
    with engine.installed(fake):
        ours = run(*asked, *EP)
    assert ours.code == 0, ours.err
    assert ours.document["tokens"] == run(*asked).document["tokens"]
    assert ours.document["provider"] == CANN
    pieces, rest = divmod(len(TEXT), PIECE)  # a token is a byte
    assert sorted(graph.runs for graph in engine.graphs.values()) == [pieces, rest + NEW - 1]
    # Ids, mask, positions where they are an input; the logits. Caches stay where they are, once
    # both buffers of each are there.
    calls = pieces + rest + NEW - 1
    copies = fake.copies()
    assert copies["device_to_host"] == calls
    assert copies["host_to_device"] - 2 * CACHES in (2 * calls, 3 * calls)


def test_verify(fake: FakeAcl, pair: list[Path]) -> None:
    short = ("--tokens", 64, "--context", 32, "--new-tokens", 6, "--json")
    with GraphEngine().installed(fake):
        outcome = run("verify", *pair, *EP, *short)
    assert (outcome.code, outcome.err) == (0, "")
    report = outcome.document["report"]
    names = [check["name"] for check in report["checks"]]
    assert f"{CANN} runs every node that it should" in names
    assert f"caches on {CANN} equal those on the CPU" in names
    assert (report["device"]["same_tokens"], report["device"]["bytes_differing"]) == (6, 0)
    assert report["device"]["codes_wrong"] is None
    assert report["placement"]["on_provider"] == report["placement"]["nodes"]


def test_info(fake: FakeAcl, pair: list[Path]) -> None:
    outcome = run("info", pair[1], "--check", *EP, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.document["provider"]["placement"]["misplaced"] == []


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_other_models_are_refused_in_a_sentence(
    fake: FakeAcl, pair: list[Path], tmp_path: Path, command: str
) -> None:
    """The provider would take them, and fail in CANN's parser."""
    other = tmp_path / "converted.onnx"
    assert run("convert", pair[0], "-o", other).code == 0
    arguments = (other, "--prompt", "x") if command == "generate" else (pair[0], other)
    told = run(command, *arguments, *EP).sentence(3)
    assert "the model is no graph for --ep cann-graph" in told
    assert told.endswith("convert the original with --target cann-graph")
