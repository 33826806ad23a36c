"""``tq-onnx info``: what is installed here, and which kernels will run."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.errors import LibraryError

_PACKAGES = ("tq-onnx", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


@dataclass(frozen=True)
class LibraryReport:
    """The operator library as it is found here.

    Attributes:
        path: the file; None if it is missing.
        version: of tq-onnx that it was built from.
        layout_digest: row layout that it was built for.
        isa: SIMD level that its kernels will use.
        isa_compiled: SIMD levels in the file.
        isa_supported: SIMD levels that this CPU runs.
        registers: whether onnxruntime accepts it.
        problem: what is wrong with it; None if nothing is.
    """

    path: str | None = None
    version: str | None = None
    layout_digest: str | None = None
    isa: str | None = None
    isa_compiled: tuple[str, ...] = ()
    isa_supported: tuple[str, ...] = ()
    registers: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class InfoReport:
    """What ``info`` shows.

    Attributes:
        python: version of the interpreter.
        platform: operating system and processor.
        packages: versions by package name; None for one that is not installed.
        layout_digest: row layout of this tq-onnx.
        cpu_features: SIMD extensions that numpy found in this CPU.
        providers: execution providers of onnxruntime.
        library: the operator library.
    """

    python: str
    platform: str
    packages: dict[str, str | None]
    layout_digest: str
    cpu_features: tuple[str, ...]
    providers: tuple[str, ...]
    library: LibraryReport


def collect() -> InfoReport:
    """Looks at the installation; a broken library is a finding and not an error."""
    from tq_onnx.codec.spec import layout_digest
    from tq_onnx.runtime.session import available_providers

    return InfoReport(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in _PACKAGES},
        layout_digest=layout_digest(),
        cpu_features=_cpu_features(),
        providers=available_providers(),
        library=_library(),
    )


@click.command()
@flags.as_json
def info(as_json: bool) -> None:
    """Show versions, the operator library, CPU features and providers.

    \b
    Example:
      tq-onnx info --json
    """
    report = collect()
    if as_json:
        terminal.print_json(report)
        return
    table = terminal.make_table("what", "found")
    for name, version in report.packages.items():
        terminal.add_row(table, name, version or "not installed")
    terminal.add_row(table, "python", report.python)
    terminal.add_row(table, "platform", report.platform)
    terminal.add_row(table, "CPU features", " ".join(report.cpu_features) or "unknown")
    terminal.add_row(table, "providers", ", ".join(report.providers))
    terminal.add_row(table, "row layout", report.layout_digest)
    library = report.library
    terminal.add_row(table, "library", library.path or "missing")
    if library.version is not None:
        terminal.add_row(table, "library version", library.version)
        terminal.add_row(table, "library row layout", library.layout_digest)
        terminal.add_row(table, "kernels use", library.isa or "nothing")
        terminal.add_row(table, "kernels compiled for", ", ".join(library.isa_compiled))
        terminal.add_row(table, "this CPU runs", ", ".join(library.isa_supported))
        terminal.add_row(table, "onnxruntime accepts it", "yes" if library.registers else "no")
    if library.problem is not None:
        terminal.add_row(table, "library problem", library.problem)
    terminal.print_table(table)


def _library() -> LibraryReport:
    from tq_onnx.runtime.library import get_library_path, library_info
    from tq_onnx.runtime.session import check_library

    path = None
    try:
        path = str(get_library_path())
        found = library_info()
    except LibraryError as error:
        return LibraryReport(path=path, problem=str(error))
    problem = None
    try:
        check_library()
    except LibraryError as error:
        problem = str(error)
    registers = problem is None
    if found.isa is None and problem is None:
        problem = "TQ_ONNX_ISA asks for a level that this CPU does not run"
    return LibraryReport(
        path=path,
        version=found.version,
        layout_digest=found.layout_digest,
        isa=found.isa,
        isa_compiled=found.isa_compiled,
        isa_supported=found.isa_supported,
        registers=registers,
        problem=problem,
    )


def _version(package: str) -> str | None:
    if package == "tq-onnx":
        from tq_onnx import __version__

        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_features() -> tuple[str, ...]:
    import numpy as np

    try:
        extensions = np.show_config(mode="dicts")["SIMD Extensions"]
    except (KeyError, TypeError):
        return ()
    return (*extensions.get("baseline", ()), *extensions.get("found", ()))
