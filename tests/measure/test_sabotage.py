"""``verify`` finds every damage, and passes whole models."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.measure.damages import (
    OF_GRAPHS,
    OF_OPERATORS,
    REFUSED,
    Damage,
    NothingToDamageError,
)
from tests.runtime.models import DYNAMO, GENAI, converted, ids, original
from tq_onnx.errors import UnsupportedModelError, VerificationError
from tq_onnx.measure.verify import VerifyReport, verify

TEXT = ids(32, seed=7)[0]


def check(before: Path, after: Path) -> VerifyReport:
    return verify(before, after, TEXT, source="", new_tokens=2, context=32, threads=1)


CASES = [
    *((name, damage) for name in (DYNAMO, GENAI) for damage in OF_GRAPHS),
    *((DYNAMO, damage) for damage in OF_OPERATORS),
]


@pytest.mark.parametrize(("name", "damage"), CASES, ids=lambda it: getattr(it, "__name__", it))
def test_a_damage_is_found(tmp_path: Path, name: str, damage: Damage) -> None:
    model = onnx.load(converted(name))
    whole = model.SerializeToString()
    try:
        damage(model)
    except NothingToDamageError:
        pytest.skip("the model has no such part")
    assert model.SerializeToString() != whole
    path = tmp_path / "damaged.onnx"
    onnx.save(model, path)
    if damage in REFUSED:
        with pytest.raises(UnsupportedModelError, match=r"layout|past_length"):
            check(original(name), path)
        return
    try:
        report = check(original(name), path)
    except VerificationError as error:
        assert "layer" in str(error)
    else:
        assert not report.holds
