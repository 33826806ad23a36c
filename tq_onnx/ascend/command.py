"""``tq-onnx verify-on-npu``: all checks on an Ascend NPU. See ``tq_onnx.ascend.verification``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tq_onnx.ascend import verification
from tq_onnx.ascend.verification import PART_SECONDS, NpuReport, Request
from tq_onnx.cli import flags, terminal
from tq_onnx.errors import ModelFileError, VerificationError
from tq_onnx.integrations.folder import find_model
from tq_onnx.verification.checks import failure


@click.command(name="verify-on-npu")
@click.argument("models", type=flags.FilePath(), nargs=-1)
@click.option(
    "-o", "--output", type=flags.FilePath(), metavar="FILE", help="Write the report to FILE."
)
@click.option(
    "--seconds",
    type=flags.Real(1, 1e9),
    default=PART_SECONDS,
    show_default=True,
    help="Stop each part after X seconds.",
)
@flags.as_json
def verify_on_npu(
    *, models: tuple[Path, ...], output: Path | None, seconds: float, as_json: bool
) -> None:
    """Check everything on an Ascend NPU and write a report to send back.

    Reads MODELS: originals, or models converted for CANN. Compares encode and attention with numpy
    for all codecs, and the bundled model with the CPU. Checks node placement and MODELS.
    Measures times.

    Writes one JSON document to FILE, and to stdout without -o or with --json. It has the names of
    files, but no folders, host or user. Exits with code 5 if a check fails; the report has the
    reason.

    With -o, finished parts are kept in FILE.parts until the report is written. After an
    interruption, the same command continues from there.

    \b
    Example:
      tq-onnx verify-on-npu -o report.json
      tq-onnx verify-on-npu model.signed4-cann.onnx -o report.json
    """
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise ModelFileError(
            "the report cannot be written there", where=str(output), fix="give another file with -o"
        )
    parts_file = None if output is None else output.with_name(f"{output.name}.parts")
    report = verification.verify_on_npu(
        Request(tuple(map(find_model, models))),
        part_seconds=seconds,
        parts_file=parts_file,
        on_progress=terminal.print_progress,
    )
    _write(report, output, as_json=as_json)
    if parts_file is not None:
        parts_file.unlink(missing_ok=True)
    _print(report, output)
    if not report.holds:
        raise VerificationError(failure(report.checks, named=5), fix="send the report back")


def _write(report: NpuReport, output: Path | None, *, as_json: bool) -> None:
    if output is None or as_json:
        terminal.print_json(report)
    if output is None:
        return
    try:
        output.write_text(terminal.json_of(report) + "\n", encoding="utf-8")
    except OSError as error:
        if not as_json:
            terminal.print_json(report)  # it took minutes to make
        raise ModelFileError(
            f"the report cannot be written ({error.strerror})",
            where=str(output),
            fix="give another file with -o",
        ) from error


def _print(report: NpuReport, output: Path | None) -> None:
    soc = (report.environment and report.environment.soc) or "an unknown device"
    passed = sum(check.holds is True for check in report.checks)
    skipped = sum(check.holds is None for check in report.checks)
    skipped_text = f", {skipped} left out" if skipped else ""
    where = "" if output is None else f", in {output}"
    click.echo(
        f"{soc}: {passed} of {len(report.checks)} checks hold{skipped_text}{where}", err=True
    )
    click.echo(report.note, err=True)
