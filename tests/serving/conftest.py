from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.genai_folder import bundled_genai


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as onnxruntime-genai's builder makes it."""
    return bundled_genai(tmp_path_factory.mktemp("genai") / "qwen3", "genai")
