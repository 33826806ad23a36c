"""``tq-onnx verify``: an original against its conversion. See ``tq_onnx.verify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tq_onnx.api import measuring
from tq_onnx.cli import flags, terminal
from tq_onnx.errors import VerificationError

if TYPE_CHECKING:
    from tq_onnx.verification.findings import VerifyReport


@dataclass(frozen=True)
class VerifyDocument:
    """What ``--json`` prints.

    Attributes:
        holds: whether every check holds.
        report: the checks and figures.
    """

    holds: bool
    report: VerifyReport


@click.command()
@click.argument("original", type=flags.FilePath())
@click.argument("converted", type=flags.FilePath())
@flags.text
@click.option(
    "--tokens",
    type=flags.Whole(16),
    default=2048,
    show_default=True,
    help="Read N tokens of the text.",
)
@click.option(
    "--new-tokens",
    type=flags.Whole(1),
    default=32,
    show_default=True,
    help="Generate N tokens greedily with each model.",
)
@flags.windows(512)
@click.option(
    "--quick",
    is_flag=True,
    help="Only check metadata, rotations, codebooks and every layer, on a short text. Takes "
    "seconds. The last line names the checks that were left out.",
)
@flags.tokenizer
@flags.threads
@flags.ep
@flags.without_library("Check only the ONNX function bodies, not the kernels.")
@flags.as_json
def verify(*, quick: bool, as_json: bool, **arguments: Any) -> None:
    """Compare a CONVERTED model with its ORIGINAL.

    Reads both models, each a file or a folder with one decoder, and runs them. Checks that
    CONVERTED has the inputs, outputs and weights of ORIGINAL and, apart from the codecs, computes
    the same in every layer. Compares kernels and function bodies with the numpy reference, errors
    of keys and values with theory, prompts in chunks with whole prompts, and caches that are
    updated in place with growing ones. Prints perplexity, KL divergence, greedy continuation and
    cache bytes. Exits with code 5 if a check fails.

    With --ep, runs CONVERTED on that provider and compares logits, greedy tokens and cache
    bytes with those of the CPU. Prints which provider runs the nodes.

    \b
    Example:
      tq-onnx verify --quick model.onnx model.int4.onnx
      tq-onnx verify model.onnx model.int4.onnx --text book.txt
    """
    with terminal.progress("Opening both models") as on_progress:
        hint = "" if quick else "verify --quick leaves out what takes longest"
        report = measuring.verify(
            **arguments, quick=quick, on_progress=terminal.announcing(on_progress, hint)
        )
    terminal.print_warnings(report.warnings)
    if as_json:
        terminal.print_json(VerifyDocument(report.holds, report))
    else:
        _print(report)
    if not report.holds:
        from tq_onnx.verification.checks import failure

        raise VerificationError(
            failure(report.checks),
            where=str(report.converted),
            fix=report.advice,
        )


def _print(report: VerifyReport) -> None:
    from tq_onnx.verification.tables import verify_tables

    for table in verify_tables(report):
        terminal.print_table(table)
    held = sum(check.holds is True for check in report.checks)
    verdict = "verified" if report.holds else "NOT verified"
    reason = "--quick left out" if report.quality is None else "not done for these caches"
    left_out = f"; {reason}: {', '.join(report.left_out)}" if report.left_out else ""
    terminal.print_line(f"{verdict}: {held} of {len(report.checks)} checks hold{left_out}")
