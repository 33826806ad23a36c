"""The comparison of two providers, with the CPU on both sides; with a device: ``tests/cann``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.models import DYNAMO, HALF, converted, ids, original
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.probe import Probe
from tq_onnx.runtime.providers import CPU
from tq_onnx.verification import devices
from tq_onnx.verification.devices import ProviderFigures, compare_providers, providers_agree

pytestmark = pytest.mark.usefixtures("exact_products")

PROMPT = ids(40, seed=3)[0]
GOOD = ProviderFigures(
    provider="X",
    prompt_tokens=9,
    new_tokens=4,
    same_tokens=4,
    gap=None,
    alike_tokens=12,
    logit_error=1e-5,
    later_logit_error=None,
    largest_logit=10.0,
    cache_bytes=1000,
    bytes_differing=0,
    codes_wrong=0,
    scale_steps=0,
    vector_error=1e-6,
)


@pytest.mark.parametrize("name", [DYNAMO, HALF])
def test_the_same_on_both_sides(name: str) -> None:
    figures = compare_providers(expose_internals(converted(name)), PROMPT, new_tokens=6, ep=CPU)
    assert (figures.same_tokens, figures.logit_error, figures.bytes_differing) == (6, 0, 0)
    assert (figures.alike_tokens, figures.later_logit_error) == (len(PROMPT) + 5, None)
    assert figures.codes_wrong == 0
    assert figures.largest_logit > 0
    assert all(check.holds for check in providers_agree(figures, "FLOAT"))


def test_another_rotation_is_no_tie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.onnx"
    convert(original(DYNAMO), other, options=Options(seed=1))
    probe, theirs = expose_internals(converted(DYNAMO)), expose_internals(other)
    made = Probe.decoder

    def decoder(self: Probe, **options: Any) -> Any:
        return made(self if options.get("exact") else theirs, **options)

    monkeypatch.setattr(Probe, "decoder", decoder)
    figures = compare_providers(probe, PROMPT, new_tokens=6, ep=CPU)
    assert figures.codes_wrong > 1000
    assert figures.bytes_differing > 1000
    failed = [check.name for check in providers_agree(figures, "FLOAT") if not check.holds]
    assert "caches on CPUExecutionProvider equal those on the CPU" in failed


@pytest.mark.parametrize("at", [0, 33])
def test_one_byte_is_found(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A code, and the upper byte of a scale."""
    figures = compared_with_damage(monkeypatch, converted(DYNAMO), (17, at))
    assert figures.bytes_differing == 1
    assert (figures.alike_tokens, figures.later_logit_error) == (len(PROMPT), 0)
    assert figures.codes_wrong == (1 if at == 0 else 0)
    assert figures.scale_steps > 1 or at == 0
    (check,) = (one for one in providers_agree(figures, "FLOAT") if not one.holds)
    assert check.name.startswith("caches on")
    assert check.detail.startswith("1 of ")


def test_a_byte_of_an_entry_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an exact window: the device's vectors say what its entries are."""
    model = tmp_path / "windowed.onnx"
    convert(original(DYNAMO), model, options=Options(residual_length=8, sink_tokens=2))
    figures = compared_with_damage(monkeypatch, model, (4, 1))
    assert (figures.bytes_differing, figures.codes_wrong, figures.scale_steps) == (1, 1, 0)
    failed = [one.name for one in providers_agree(figures, "FLOAT") if not one.holds]
    assert failed == ["caches on CPUExecutionProvider equal those on the CPU"]


def compared_with_damage(
    monkeypatch: pytest.MonkeyPatch, model: Path, place: tuple[int, int]
) -> ProviderFigures:
    """A comparison in which a row and byte of the device's caches are another in the end."""
    calls = []
    given = devices.all_planes

    def spoilt(decoder: Any) -> list[Any]:
        planes = given(decoder)
        calls.append(decoder)
        if len(calls) == 4:  # of the device, after the second call
            planes[2][(0, 1, *place)] ^= 0x40
        return planes

    monkeypatch.setattr(devices, "all_planes", spoilt)
    return compare_providers(expose_internals(model), PROMPT, new_tokens=2, ep=CPU)


@pytest.mark.parametrize(
    ("changes", "dtype", "failed"),
    [
        ({}, "FLOAT", []),
        ({"logit_error": 2e-4}, "FLOAT", ["logits"]),
        ({"logit_error": float("inf")}, "FLOAT", ["logits"]),
        ({"logit_error": 2e-2}, "FLOAT16", []),
        ({"logit_error": 4e-1}, "FLOAT16", ["logits"]),
        # Ties move all that follows, and nothing before.
        ({"later_logit_error": 2e-2}, "FLOAT", []),
        ({"later_logit_error": 4e-1}, "FLOAT", ["logits"]),
        ({"logit_error": 2e-4, "later_logit_error": 2e-2}, "FLOAT", ["logits"]),
        ({"same_tokens": 3, "gap": 0.15, "later_logit_error": 2e-2}, "FLOAT", []),
        ({"same_tokens": 3, "gap": 1e-5}, "FLOAT", ["greedy"]),
        ({"same_tokens": 3, "gap": 0.15}, "FLOAT16", []),
        ({"same_tokens": 3, "gap": 0.65}, "FLOAT16", ["greedy"]),
        ({"bytes_differing": 1, "vector_error": 0.1}, "FLOAT", ["caches"]),
        ({"bytes_differing": 1, "codes_wrong": 1}, "FLOAT", ["caches"]),
        ({"bytes_differing": 1, "scale_steps": 2}, "FLOAT", ["caches"]),
        ({"bytes_differing": 1, "scale_steps": 1}, "FLOAT", []),
    ],
)
def test_what_must_hold(changes: dict[str, Any], dtype: str, failed: list[str]) -> None:
    found = providers_agree(replace(GOOD, **changes), dtype)
    assert [check.name.split()[0] for check in found if not check.holds] == failed
    assert np.unique([check.name for check in found]).size == 3
