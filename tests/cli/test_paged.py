"""Commands on a model whose caches lie in pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run import run
from tests.decoders.running import FIXTURES
from tests.integrations.genai_folder import bundled_genai
from tq_onnx.targets.paged.target import PAGED
from tq_onnx.targets.registry import TARGETS

ORIGINAL = FIXTURES / "genai-cpu-fp32.onnx"


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("paged") / "model.onnx"
    assert run("convert", ORIGINAL, "-o", output, "--paged", "--block-size", "32").code == 0
    return output


CODES = ("--residual-length", "0", "--sink-tokens", "0")
"""Pages of rows alone, as other caches have them."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("rows") / "model.onnx"
    flags = ("--paged", "--block-size", "32", *CODES)
    assert run("convert", ORIGINAL, "-o", output, *flags).code == 0
    return output


def test_commands_that_take_it(paged: Path) -> None:
    assert "pages of 32 tokens" in run("inspect", paged).out
    assert "int4" in run("fit", paged, "--memory", "8GB").out
    verified = run("verify", ORIGINAL, paged, "--tokens", "64", "--quick")
    assert "request by request" in verified.out
    assert "verified: 14 of 14 checks hold" in verified.out
    assert "uint8[num_blocks, 32, 2, 51]" in run("diff", ORIGINAL, paged).out
    refused = run("verify", ORIGINAL, paged, "--tokens", "64", "--no-library", "--quick")
    assert refused.sentence(4).endswith(
        "caches in pages run on the operator library only; leave --no-library out"
    )


def test_a_folder_continues_a_text(tmp_path: Path) -> None:
    """As the same codecs do without pages."""
    folder, texts = bundled_genai(tmp_path / "original", "genai"), []
    for flags in (("--paged",), ()):
        output = tmp_path / "-".join(("converted", *flags))
        run("convert", folder, "-o", output, *flags)
        found = run("generate", output, "--prompt", "Call me", "--max-new-tokens", 20, "--json")
        texts.append(found.document["text"])
    assert texts[0] == texts[1]


def test_quality_is_that_of_the_same_rows_without_pages(rows: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.onnx"
    run("convert", ORIGINAL, "-o", plain, *CODES)
    few = ("--tokens", "64", "--context", "32", "--json")
    models = run("report", ORIGINAL, rows, plain, *few).document["models"]
    found, expected = ({**model, "name": "", "path": ""} for model in models)
    assert found == expected


def test_speed(paged: Path, rows: Path) -> None:
    few = ("--contexts", "40", "--tokens", "2", "--json")
    for model, width in ((rows, 34), (paged, 51)):
        (row,) = run("bench", ORIGINAL, model, *few).document["rows"]
        assert row["after"]["in_place"]
        assert row["after"]["cache_bytes"] == 40 * 8 * width


def test_both_flags_mean_the_same(tmp_path: Path) -> None:
    one, other = tmp_path / "one.onnx", tmp_path / "other.onnx"
    run("convert", ORIGINAL, "-o", one, "--paged")
    run("convert", ORIGINAL, "-o", other, "--target", "paged", "--paged")
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("target", [name for name in TARGETS if name != PAGED])
def test_two_targets_are_refused(target: str, tmp_path: Path) -> None:
    flags = ("--target", target, "--paged")
    for order in (flags, flags[2:] + flags[:2]):
        refused = run("convert", ORIGINAL, "-o", tmp_path / "one.onnx", *order)
        assert f"--target {target} and --paged are two targets" in refused.sentence(2)
    assert not list(tmp_path.iterdir())


def test_sizes_of_an_engine_are_those_of_a_folder(tmp_path: Path) -> None:
    for flag in ("--num-blocks", "--max-batch-size"):
        refused = run("convert", ORIGINAL, "-o", tmp_path / "one.onnx", "--paged", flag, "8")
        assert f"{flag} goes into the configuration of a folder" in refused.sentence(2)
    assert not list(tmp_path.iterdir())
