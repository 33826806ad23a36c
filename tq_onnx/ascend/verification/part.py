"""One part of the verification, in a process of its own.

    python -m tq_onnx.ascend.verification.part PART REQUEST FINDINGS

A kernel that hangs or that leaves the device in a state of error must cost its own checks only.
Arguments: the part, a file with the request, and the file for the findings. An error that is raised
before the first check goes into that file too.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from tq_onnx.ascend.verification import environment
from tq_onnx.ascend.verification.anonymise import anonymise
from tq_onnx.ascend.verification.cann_attention import check_cann_attention
from tq_onnx.ascend.verification.codec_operators import check_attention, check_encode
from tq_onnx.ascend.verification.decoder_operators import check_decoder
from tq_onnx.ascend.verification.findings import (
    BRIEF,
    PARTS,
    DeviceCheck,
    Findings,
    Request,
    clause,
)
from tq_onnx.ascend.verification.models import Tokens, check_model, for_cann
from tq_onnx.ascend.verification.singlenodes import Tables, encode_model
from tq_onnx.errors import LibraryError, TqOnnxError
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.runtime.library import get_library_path
from tq_onnx.runtime.placement import try_provider
from tq_onnx.runtime.providers import CANN
from tq_onnx.runtime.session import make_session

BUNDLED: Final = "bundled Qwen3"
REFUSAL: Final = "CANN's attention in the sessions of this part"
PROMPT_TOKENS: Final = 24

Run = Callable[[Findings, Request], None]


def _device(findings: Findings, request: Request) -> None:
    """Open a session with our operators, so that all libraries are loaded, and gather the facts."""
    try_provider(CANN)  # raises what ends the command: there is no CANN here
    findings.check(
        "kernel library",
        lambda: (make_session(encode_model(Tables(64), "float32"), ep=CANN) is not None, {}),
        "the library is found, fits this version and knows the device",
    )
    findings.simulated = environment.is_simulated()
    findings.environment = environment.describe()


def _cann_attention(findings: Findings, request: Request) -> None:
    try_provider(CANN)  # then ACL is there
    check_cann_attention(findings)


def _encode(findings: Findings, request: Request) -> None:
    try_provider(CANN)  # then the device has a name
    check_encode(findings)


def _attention(findings: Findings, request: Request) -> None:
    try_provider(CANN)
    check_attention(findings)


def _decoder(findings: Findings, request: Request) -> None:
    check_decoder(findings)


def _trained(findings: Findings, request: Request) -> None:
    with _bundled() as (model, prompt):
        check_model(findings, BUNDLED, for_cann(model, model.parent), prompt)


@contextmanager
def _bundled() -> Iterator[tuple[Path, Tokens]]:
    """Yield the bundled trained model, as it was exported, and token ids for it: its bytes."""
    prompt = np.frombuffer(heldout_text().encode()[:PROMPT_TOKENS], np.uint8).astype(np.int64)
    with tempfile.TemporaryDirectory(prefix="tq-onnx-npu-") as folder:
        yield build_bundled("dynamo", Path(folder)), prompt


def _models(findings: Findings, request: Request) -> None:
    for model in request.models:
        with tempfile.TemporaryDirectory(prefix="tq-onnx-npu-") as folder:
            try:
                ready = for_cann(model, Path(folder))
            except TqOnnxError as error:
                findings.checks.append(
                    DeviceCheck(f"{model.name}: conversion", False, problem=clause(error))
                )
            else:
                check_model(findings, model.name, ready)


_PARTS: Final = (
    _device,
    _cann_attention,
    _encode,
    _attention,
    _decoder,
    _trained,
    _models,
)
_RUN: Final[Mapping[str, Run]] = MappingProxyType(dict(zip(PARTS, _PARTS, strict=True)))


def _note_refusal(findings: Findings) -> None:
    """Add a check with CANN's words, if it refused attention over codes in a session here."""
    refusal = ctypes.CDLL(str(get_library_path())).tq_cann_refusal
    refusal.restype = ctypes.c_char_p
    problem = anonymise(refusal().decode(errors="replace"))
    if problem:
        findings.checks.append(DeviceCheck(REFUSAL, None, problem=problem))


def run_part(part: str, request: Request, output: Path) -> None:
    """Run a part and write its findings, even if it raises."""
    findings = Findings(BRIEF) if request.brief else Findings()
    error: TqOnnxError | None = None
    try:
        _RUN[part](findings, request)
        _note_refusal(findings)
    except LibraryError as absent:
        error = absent
        findings.checks.append(DeviceCheck(part, False, problem=clause(absent)))
    except Exception as failure:
        findings.checks.append(DeviceCheck(part, False, problem=clause(failure)))
    document = {
        "checks": [asdict(check) for check in findings.checks],
        "timings": [asdict(timing) for timing in findings.timings],
        "simulated": findings.simulated,
        "environment": None if findings.environment is None else asdict(findings.environment),
        "absent": None if error is None else [error.what, error.where, error.fix],
    }
    output.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    name, request_file, target = sys.argv[1:]
    run_part(name, Request.from_json(Path(request_file).read_text(encoding="utf-8")), Path(target))
