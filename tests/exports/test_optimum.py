"""A converted export of optimum, opened by the class for optimum's users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.exports.conftest import Exports
from tests.exports.recipes import ROOT
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.runtime.library import get_library_path
from tq_onnx.runtime.opening import open_converted

pytestmark = [
    pytest.mark.exports,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the exporters' pins need Python 3.11"),
]

PROMPT, NEW = list(b"Call me Ishmael. Some"), 24
#: Greedy tokens of one sequence and of two, of which one is shorter, and what an original is told.
SCRIPT = """
import json, sys, torch
from tq_onnx.integrations.optimum import TurboQuantForCausalLM
converted, original, prompt, new = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
model = TurboQuantForCausalLM.from_pretrained(converted)
settings = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
ids = torch.tensor([prompt])
alone = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
padded = torch.nn.functional.pad(ids, (4, 0))
mask = torch.stack([torch.arange(padded.shape[1]) >= 4, torch.ones(padded.shape[1])]).long()
pair = model.generate(torch.cat([padded, padded]), attention_mask=mask, **settings)
try:
    TurboQuantForCausalLM.from_pretrained(original)
except Exception as error:
    told = str(error)
print(json.dumps({"alone": alone[0].tolist(), "pair": pair[0].tolist()[4:], "told": told}))
"""


def test_generate(exports: Exports, environments: Path, tmp_path: Path) -> None:
    original, converted = exports("optimum"), tmp_path / "converted"
    convert_folder(original, converted)
    done = subprocess.run(
        [
            *(str(environments / "transformers4" / "bin" / "python"), "-c", SCRIPT),
            *(str(converted), str(original), json.dumps(PROMPT), str(NEW)),
        ],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "TQ_ONNX_LIBRARY": str(get_library_path())}
        | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    decoder = open_converted(converted / "model.onnx").decoder()
    logits = decoder.prefill(np.array([PROMPT]))[:, -1]
    tokens = list(PROMPT)
    for _ in range(NEW):
        tokens.append(int(logits.argmax()))
        logits = decoder.step([tokens[-1]])
    assert found["alone"] == found["pair"] == tokens
    assert "was not converted" in found["told"]
