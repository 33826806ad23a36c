"""``tq-onnx info``: show versions, kernels and providers, and where a model's nodes run.

What is wrong with an installation is a finding of the report; ``--check`` makes it an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.errors import VerificationError
from tq_onnx.measure.tables import TextTable
from tq_onnx.runtime.providers import PROVIDERS

if TYPE_CHECKING:
    from tq_onnx.runtime.installation import InfoReport


@click.command()
@click.argument("model", type=flags.FilePath(), required=False)
@click.option("--check", is_flag=True, help="Exit with code 5 if a problem is found.")
@flags.ep
@flags.as_json
def info(*, model: Path | None, check: bool, ep: str, as_json: bool) -> None:
    """Show versions, the operator library, CPU features and execution providers.

    Reads the installation. With MODEL, a file or a folder with one decoder, it also prints which
    provider runs the nodes. These count as problems: a provider that does not load, a
    floating-point node or a cache on a provider other than --ep, and TurboQuant nodes without
    kernels.

    \b
    Example:
      tq-onnx info --json
      tq-onnx info model.int4.onnx --check
    """
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.runtime.installation import inspect_installation

    if model is not None:
        model = find_model(model)
    chosen = PROVIDERS[ep]
    runs_model = model is not None or check or chosen.has_own_memory
    report = inspect_installation(model, chosen if runs_model else None)
    if as_json:
        terminal.print_json(report)
    else:
        terminal.print_table(_table(report))
    if check and report.problems:
        raise VerificationError("; ".join(report.problems))


def _table(report: InfoReport) -> TextTable:
    rows: list[tuple[str, object]] = []
    for name, version in report.packages.items():
        rows.append((name, version or "not installed"))
    rows.append(("python", report.python))
    rows.append(("platform", report.platform))
    rows.append(("CPU features", " ".join(report.cpu_features) or "unknown"))
    rows.append(("providers", ", ".join(report.providers)))
    rows.append(("row layout", report.layout_digest))
    library = report.library
    rows.append(("library", library.path or "missing"))
    if library.version is not None:
        rows.append(("library version", library.version))
        rows.append(("library row layout", library.layout_digest))
        rows.append(("kernels use", library.isa or "nothing"))
        rows.append(("kernels compiled for", ", ".join(library.isa_compiled)))
        rows.append(("of these this CPU runs", ", ".join(library.isa_supported)))
        rows.append(("onnxruntime accepts it", "yes" if library.registers else "no"))
    if library.problem is not None:
        rows.append(("library problem", library.problem))
    if report.provider is not None:
        what = report.provider.model or "a model of one node"
        rows.append((f"{what} runs", report.provider.placement or "not"))
        if report.provider.problem is not None:
            rows.append(("provider problem", report.provider.problem))
    return TextTable.of(("what", "found"), rows)
