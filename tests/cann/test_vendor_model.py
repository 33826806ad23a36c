"""The trained Qwen3 where our kernels are not built: CANN's own operators run all of it.

CANN's encoder is not ours, so that codes differ from the CPU's; what is held to is that nothing is
left to the CPU, that a step has one copy, and that attention over codes and over what they decode
to choose the same tokens.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN, CPU
from tq_onnx.ascend.targets import CANN as CANN_TARGET
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.huggingface import load_tokenizer
from tq_onnx.runtime import providers
from tq_onnx.runtime.opening import open_converted

pytestmark = pytest.mark.cann

STEPS, CAPACITY, LAYERS = 64, 128, 4
ATTENTION = "aclnnFusedInferAttentionScoreV2"


def test_greedy_tokens(fake: FakeAcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ONNX_CANN_KERNELS", raising=False)
    original, model = build_bundled("dynamo", tmp_path), tmp_path / "signed4.onnx"
    without = Options(residual_length=0, sink_tokens=0)  # those need our kernels
    convert(original, model, preset="signed4", options=without, target=CANN_TARGET)
    prompt = load_tokenizer(original.parent).encode(heldout_text()[1000:1400])[:24]
    opened = open_converted(model, ep=providers.CANN)
    assert opened.session.get_providers() == [CANN, CPU]
    chosen: list[list[int]] = []
    # What is refused is remembered, so that this comes last.
    for refused in (None, f"{ATTENTION} of INT4".encode()):
        ctypes.CDLL("libopapi.so").fake_acl_refuse_operator(refused)
        decoder = opened.decoder(capacity=CAPACITY)
        # A prompt in two chunks.
        decoder.prefill([prompt[:16]])
        logits = decoder.prefill([prompt[16:]])[:, -1]
        tokens: list[int] = []
        for _ in range(STEPS):
            tokens.append(int(logits.argmax()))
            fake.reset()
            logits = decoder.prefill(np.array([[tokens[-1]]]))[:, -1]
            copies, counts = fake.copies(), fake.counts()
            assert copies.get("host_to_device", 0) + copies.get("device_to_host", 0) <= 1
            assert counts[f"op.{ATTENTION}"] == LAYERS
            decodes = counts.get("op.aclnnAscendAntiQuant", 0)
            assert decodes == (2 * LAYERS if refused else 0)
        chosen.append(tokens)
    ctypes.CDLL("libopapi.so").fake_acl_refuse_operator(None)
    assert chosen[0] == chosen[1]
    launches = sum(count for name, count in counts.items() if name.startswith("op."))
    print(f"{launches} launches of the last step")
