"""The kernels on CANN's own headers, which a developer fetches: see ``check_headers.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import check_headers

URL = "https://github.com/mirror-cann/asc-devkit"
HEADERS = os.environ.get("TQ_CANN_HEADERS")


def test_a_folder_without_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        check_headers.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path} has no include/basic_api: it is to be a checkout of {URL}" in last


@pytest.mark.cann
@pytest.mark.skipif(HEADERS is None, reason="needs TQ_CANN_HEADERS, a checkout of CANN's headers")
def test_the_kernels_on_canns_headers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", str(HEADERS)])
    assert check_headers.main() == 0, capsys.readouterr().out
