"""The committed C++ header of the operators is what their records render."""

from __future__ import annotations

from pathlib import Path

import pytest

from tq_onnx.ops import operatorheader
from tq_onnx.ops.domain import DOMAIN, VERSION
from tq_onnx.ops.operator import Operator
from tq_onnx.ops.operators import OPERATORS

HEADER = Path(__file__).parents[2] / "custom_ops" / "include" / "tq" / "operators.h"


def test_check_sees_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "operators.h"
    assert operatorheader.main(["--check", str(path)]) == 1
    assert operatorheader.main([str(path)]) == 0
    assert path.read_bytes() == HEADER.read_bytes(), "run: python -m tq_onnx.ops.operatorheader"
    assert operatorheader.main(["--check", str(path)]) == 0
    path.write_text(path.read_text().replace("kPastLength{2", "kPastLength{3"))
    assert operatorheader.main(["--check", str(path)]) == 1


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_parameter_has_its_slot_and_name(operator: type[Operator]) -> None:
    text = operatorheader.render_header()
    assert f'kDomain[] = "{DOMAIN}"' in text
    assert f"kDomainVersion = {VERSION};" in text
    (struct,) = [part for part in text.split("\nstruct ") if f'kName[] = "{operator.name}"' in part]
    for parameters, ends in ((operator.inputs, ("false", "true")), (operator.outputs, ("}",))):
        for slot, parameter in enumerate(parameters):
            (line,) = [
                each for each in struct.splitlines() if f'{{{slot}, "{parameter.name}",' in each
            ]
            assert ends[parameter.is_optional] in line
