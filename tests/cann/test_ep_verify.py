"""``verify``, ``info`` and ``generate`` of the bundled Qwen3 that was converted for CANN."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN
from tests.cli.run import run
from tests.runtime.models import HALF, original
from tq_onnx.ascend.targets import CANN as CANN_TARGET
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled

pytestmark = [pytest.mark.cann, pytest.mark.usefixtures("kernels_named")]

EP = ("--ep", "cann")
SHORT = ("--tokens", 80, "--context", 40, "--new-tokens", 6, "--threads", 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The original, and its conversion."""
    folder = tmp_path_factory.mktemp("cann")
    original = build_bundled("dynamo", folder)
    convert(original, folder / "cann.onnx", target=CANN_TARGET)
    return original, folder / "cann.onnx"


def test_verify_holds_on_the_device_and_beside_the_cpu(
    fake: FakeAcl, pair: tuple[Path, Path]
) -> None:
    outcome = run("verify", *pair, *EP, *SHORT, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.document["holds"] is True
    report = outcome.document["report"]
    names = [check["name"] for check in report["checks"] if CANN in check["name"]]
    assert names == [
        f"encode: kernel on {CANN} equals the reference",
        f"attention: kernel on {CANN} equals the reference",
        f"{CANN} runs every node that it should",
        f"logits on {CANN} equal those on the CPU",
        f"greedy tokens on {CANN} equal those on the CPU",
        f"caches on {CANN} equal those on the CPU",
    ]
    placement = report["placement"]
    assert (placement["provider"], placement["misplaced"]) == (CANN, [])
    assert (placement["encode"], placement["attention"]) == (8, 4)
    assert placement["on_provider"] + sum(placement["elsewhere"].values()) == placement["nodes"]
    device = report["device"]
    assert (device["provider"], device["same_tokens"], device["new_tokens"]) == (CANN, 6, 6)
    assert device["logit_error"] <= 1e-4
    assert device["codes_wrong"] == 0


def test_float16_holds(fake: FakeAcl, tmp_path: Path) -> None:
    """The CPU computes between its nodes in float32: other codes, each right for its vector."""
    path = tmp_path / "cann.onnx"
    # With gains a tie can change all codes of a row, and logits of random weights in half precision
    # then differ by more than verify allows.
    convert(original(HALF), path, target=CANN_TARGET, options=Options(gains=False))
    outcome = run("verify", original(HALF), path, *EP, *SHORT, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    device = outcome.document["report"]["device"]
    assert device["bytes_differing"] > 0
    assert (device["codes_wrong"], device["scale_steps"]) == (0, 0)
    assert 1e-4 < device["vector_error"] < 5e-3


def test_without_the_option_the_cpu_runs_it(pair: tuple[Path, Path]) -> None:
    outcome = run("verify", *pair, *SHORT, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.document["report"]["device"] is None
    assert outcome.document["report"]["placement"]["provider"] == "CPUExecutionProvider"


def test_generate_says_what_it_says_on_the_cpu(
    fake: FakeAcl, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "float")  # as the device
    asked = ("generate", pair[1], "--prompt", "It was ", "--max-new-tokens", 12, "--json")
    ours, theirs = run(*asked, *EP).document, run(*asked).document
    assert ours["text"] == theirs["text"]
    assert ours["tokens"] == theirs["tokens"]
    assert (ours["provider"], theirs["provider"]) == (CANN, "CPUExecutionProvider")
    assert ours["cache_bytes"] == theirs["cache_bytes"]


def test_weights_that_differ_do_not_hold(
    fake: FakeAcl, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of the original; the provider agrees with the CPU about them all the same."""
    model = onnx.load(pair[1])
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    array = numpy_helper.to_array(weight)
    changed = np.random.default_rng(0).permutation(array.reshape(-1)).reshape(array.shape)
    weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
    path = tmp_path / "changed.onnx"
    onnx.save(model, path)
    outcome = run("verify", pair[0], path, *EP, *SHORT, "--json")
    assert outcome.code == 5
    failed = [one["name"] for one in outcome.document["report"]["checks"] if not one["holds"]]
    assert not [name for name in failed if "those on the CPU" in name]
