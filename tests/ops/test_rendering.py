"""The command line of headers that Python renders for C++."""

from __future__ import annotations

from pathlib import Path

import pytest

from tq_onnx.ops import header


def test_check_names_the_line_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "codec_spec.h"
    again = f"run python -m tq_onnx.ops.header {path}"
    assert header.main(["--check", str(path)]) == 1
    assert f"{path}: there is no such file; {again}" in capsys.readouterr().out
    assert header.main([str(path)]) == 0
    assert header.main(["--check", str(path)]) == 0
    assert capsys.readouterr().out == ""
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], "int wrong;", *lines[11:]]) + "\n")
    assert header.main(["--check", str(path)]) == 1
    said = capsys.readouterr().out
    assert f"line 11 is 'int wrong;', and should be {lines[10]!r}; {again}" in said
    path.write_text("\n".join([*lines, "int more;"]) + "\n")
    assert header.main(["--check", str(path)]) == 1
    assert "line" in capsys.readouterr().out
