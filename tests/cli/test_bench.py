from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

from tests.cli.run import run
from tests.runtime.models import DYNAMO, GENAI, converted, original
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.runtime import session as sessions

FEW = ("--tokens", 2, "--threads", 1)


def test_the_bundled_model_at_the_contexts_that_fit(tmp_path: Path) -> None:
    build_bundled("genai", tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    picture = tmp_path / "speed.svg"
    outcome = run("bench", tmp_path, *FEW, "--prompt-limit", 0, "--picture", picture)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert "model.onnx before and after int4: medians of 2 decode steps, 1 thread\n" in outcome.out
    rows = [line.split() for line in outcome.out.splitlines() if line.strip().endswith(" x")]
    # It has 2,048 positions: of the usual contexts only the first fits.
    assert [row[0] for row in rows] == ["1,024"]
    # 1,024 tokens and 144 rows of the exact window.
    assert rows[0][-6:] == ["8.4", "MB", "1.2", "MB", "6.80", "x"]
    assert "grow" not in outcome.out
    assert "MB of cache" in picture.read_text()
    # The conversion is made in memory.
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "speed.svg"])


def test_json_with_a_converted_model() -> None:
    models = (original(DYNAMO), converted(DYNAMO))
    outcome = run("bench", *models, *FEW, "--contexts", "96,32", "--prompt-limit", 32, "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert document["preset"] == "int4"
    assert document["kernels"] is True
    assert document["converted"] == str(models[1])
    short, long = document["rows"]
    assert [short["context"], long["context"]] == [32, 96]
    assert short["first_token_speedup"] > 0
    assert long["first_token_speedup"] is None
    assert long["before"]["first_token_seconds"] is None
    assert long["before"]["cache_bytes"] == 96 * 2048
    assert long["after"]["cache_bytes"] == 96 * 272
    assert long["cache_ratio"] == pytest.approx(256 / 34)
    assert [long[side]["in_place"] for side in ("before", "after")] == [False, True]
    step = long["after"]["step_seconds"]
    assert long["after"]["tokens_per_second"] == pytest.approx(1 / step)
    speeds = [long[side]["tokens_per_second"] for side in ("before", "after")]
    assert long["speedup"] == pytest.approx(speeds[1] / speeds[0])


def test_a_table_with_the_time_to_the_first_token() -> None:
    outcome = run("bench", original(GENAI), *FEW, "--contexts", "48")
    assert outcome.code == 0, outcome.err
    (row,) = (line for line in outcome.out.splitlines() if line.strip().endswith(" x"))
    assert row.count(" s ") == 2
    assert row.count(" x") == 3
    assert "in pieces of 512" in outcome.out
    assert "copies of the rows" not in outcome.out


def test_notes_tell_what_a_reader_must_know() -> None:
    few = (*FEW, "--contexts", "48", "--prompt-limit", 0, "--no-library", "--preset", "k8v4")
    outcome = run("bench", original(DYNAMO), *few)
    assert outcome.code == 0, outcome.err
    assert "before and after k8v4" in outcome.out
    assert "copies of the rows of a short prompt" in outcome.out
    assert "the original's caches only grow" in outcome.out
    assert "kernels of the operator library did not run" in outcome.out
    assert "first token:" not in outcome.out


def test_what_is_refused(tmp_path: Path) -> None:
    before, after = original(DYNAMO), converted(DYNAMO)
    assert run("bench").code == 2
    assert "missing.onnx" in run("bench", tmp_path / "missing.onnx").sentence(4)
    assert "converted one already" in run("bench", after).sentence(3)
    assert "was not converted" in run("bench", before, before, *FEW).sentence(3)
    assert "was not made from" in run("bench", original(GENAI), after, *FEW).sentence(5)
    assert "--preset" in run("bench", before, after, "--preset", "int3").sentence(2)
    for text in ("many", "0", "16,-1", ""):
        assert "like 1024,4096" in run("bench", before, "--contexts", text).sentence(2)
    assert "speed.txt" in run("bench", before, "--plot", tmp_path / "speed.txt").sentence(2)
    few = run("bench", original(GENAI), *FEW, "--contexts", "64,126").sentence(2)
    assert "a context of 126 tokens and 4 after it do not run" in few
    assert "--contexts" in few
    much = run("bench", before, *FEW, "--contexts", 10**9).sentence(2)
    assert " GB of memory are free" in much


# ``--ep`` and ``info --check`` with the CPU's ONNX Runtime; with the other: ``tests/cann``.


pytestmark = pytest.mark.skipif(
    "CANNExecutionProvider" in onnxruntime.get_available_providers(),
    reason="the wheel has the provider",
)

ABSENT = f"this onnxruntime {onnxruntime.__version__} has no CANNExecutionProvider, only "
INSTALL = "; install onnxruntime-cann in an environment of its own"


def is_absent(sentence: str) -> bool:
    return ABSENT in sentence and sentence.endswith(INSTALL)


def test_verify() -> None:
    assert is_absent(run("verify", original(DYNAMO), converted(DYNAMO), "--ep", "cann").sentence(4))


def test_generate() -> None:
    assert is_absent(run("generate", converted(DYNAMO), "--prompt=x", "--ep=cann").sentence(4))


def test_bodies_on_a_device() -> None:
    outcome = run("generate", converted(DYNAMO), "--prompt=x", "--ep=cann", "--no-library")
    assert "function bodies are not what CANNExecutionProvider runs" in outcome.sentence(2)


def test_a_provider_that_nobody_knows() -> None:
    assert "'gpu' is not one of 'cpu', 'cann'" in run("info", "--ep", "gpu").sentence(2)


def test_info_of_an_installation() -> None:
    outcome = run("info", "--check")
    assert (outcome.code, outcome.err) == (0, "")
    if sessions._HAS_RECORD:
        assert "1 of 1 nodes on CPUExecutionProvider" in outcome.out
    assert run("info", "--json").document["provider"] is None
    assert run("info", "--check", "--json").document["provider"]["problem"] is None


def test_info_of_a_provider_that_is_not_there() -> None:
    assert is_absent(run("info", "--check", "--ep", "cann").sentence(5))
    told = run("info", "--ep", "cann", "--json")
    assert told.code == 0  # a finding
    found = told.document["provider"]
    assert is_absent(found["problem"])
    assert (found["provider"], found["placement"]) == ("CANNExecutionProvider", None)


def test_info_of_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ONNX_LIBRARY", "nowhere.so")
    assert run("info").code == 0
    assert "nowhere.so" in run("info", "--check").sentence(5)


@pytest.mark.parametrize("model", [original, converted])
def test_info_of_a_model(model: object) -> None:
    path = model(DYNAMO)  # type: ignore[operator]
    outcome = run("info", path, "--check", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = outcome.document["provider"]
    assert (found["model"], found["problem"]) == (str(path), None)
    placement = found["placement"]
    assert placement["on_provider"] == placement["nodes"]
    assert (placement["encode"], placement["attention"]) == (
        (4, 2) if model is converted else (0, 0)
    )


def test_info_of_a_file_that_is_not_there() -> None:
    assert "nothing.onnx" in run("info", "nothing.onnx").sentence(4)
