"""Keys and values of the bundled trained Qwen3 on held-out text, as its attention sees them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.huggingface import load_tokenizer
from tq_onnx.runtime.opening import open_original

TOKENS = 300


@pytest.fixture(scope="session")
def real_vectors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """``layer-key`` and ``layer-value`` to float64 ``[n, 128]``, no row twice.

    Values of layer 0 depend on the token alone, and a text of bytes has few: equal rows would give
    a few vectors most of the weight.
    """
    folder: Path = tmp_path_factory.mktemp("qwen3")
    build_bundled("dynamo", folder)
    opened = open_original(folder / "model.onnx", threads=1)
    tokens = np.asarray(load_tokenizer(folder).encode(heldout_text()[:4000]), np.int64)[:TOKENS]
    decoder = opened.decoder()
    decoder.prefill(tokens[None])
    found = {}
    for index in range(len(decoder.signature.caches)):
        # Keys and values alternate, in layer order.
        name = f"{index // 2}-{('key', 'value')[index % 2]}"
        rows = decoder.cache(index).reshape(-1, 128)
        found[name] = np.unique(rows, axis=0).astype(np.float64)
    return found
