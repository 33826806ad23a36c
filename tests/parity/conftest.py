"""Prints what the parity tests measured."""

from __future__ import annotations

from typing import Any

from tests.parity.compare import ERRORS, MEASURED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for record in (MEASURED, ERRORS):
        for key in [key for key in record if "negative" in key]:
            del record[key]
    if not MEASURED and not ERRORS:
        return
    terminalreporter.section("parity, measured")
    for backend, record in MEASURED.items():
        rate = record.ties / record.coordinates
        terminalreporter.write_line(
            f"{backend:10} codes: {record.ties} ties in {record.coordinates} ({rate:.1e}), "
            f"at most {record.strain:.2f} of a tie's distance; "
            f"scales: at most {record.scale_steps} step in {record.rows} rows"
        )
    for (backend, dtype), error in ERRORS.items():
        terminalreporter.write_line(f"{backend:10} attention, {dtype}: {error:.2e}")
