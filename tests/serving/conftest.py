from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.genai_folder import bundled_genai
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.targets.registry import target_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as onnxruntime-genai's builder makes it."""
    return bundled_genai(tmp_path_factory.mktemp("genai") / "qwen3", "genai")


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
