from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.genai_folder import bundled_genai
from tq_onnx.conversion.options import Options
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.targets.registry import target_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as onnxruntime-genai's builder makes it."""
    return bundled_genai(tmp_path_factory.mktemp("genai") / "qwen3", "genai")


@pytest.fixture(scope="session")
def exact_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same with caches that lose nothing: in 20 pages of 16 tokens, and not in pages."""
    source = bundled_genai(tmp_path_factory.mktemp("exact") / "qwen3", "genai")
    plain = Options(residual_length=0, sink_tokens=0)
    pages = target_of("paged", block_size=16, num_blocks=20)
    return {
        "paged": convert_folder(
            source, source.with_name("paged"), preset="raw", options=plain, target=pages
        ).output,
        "static": convert_folder(
            source, source.with_name("static"), preset="raw", options=plain
        ).output,
    }


@pytest.fixture(scope="module")
def int4(folder: Path) -> Path:
    return convert_folder(folder, folder.with_name("int4")).output


@pytest.fixture(scope="module")
def raw(folder: Path) -> Path:
    return convert_folder(folder, folder.with_name("raw"), preset="raw").output


@pytest.fixture(scope="module")
def paged(folder: Path) -> Path:
    """Caches in pages, as exact as those of ``raw``."""
    target = target_of("paged", num_blocks=120)
    return convert_folder(folder, folder.with_name("paged"), preset="raw", target=target).output
