"""Look at an installation: packages, the operator library, providers, and where a model runs.

What is broken is a finding of the report, and not an error.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np

from tq_onnx.codec.spec import layout_digest
from tq_onnx.errors import LibraryError, UnsupportedModelError
from tq_onnx.runtime.library import get_library_path, library_info
from tq_onnx.runtime.placement import PlacementReport, open_placed, problem_of, try_provider
from tq_onnx.runtime.providers import PROVIDERS, ExecutionProvider
from tq_onnx.runtime.session import available_providers, check_library
from tq_onnx.version import __version__

_PACKAGES: Final = ("tq-onnx", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


@dataclass(frozen=True)
class LibraryReport:
    """The operator library as it is found here.

    Attributes:
        path: the file; None if it is missing.
        version: of tq-onnx that it was built from.
        layout_digest: row layout that it was built for.
        isa: SIMD level that its kernels will use.
        isa_compiled: SIMD levels in the file.
        isa_supported: those that this CPU runs.
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
class ProviderReport:
    """An execution provider as it is found here, and what it runs.

    Attributes:
        provider: its name.
        model: the model that was opened; None for one of a single node.
        placement: where the nodes of the model run; None if it was not opened.
        problem: what is wrong; None if nothing is.
    """

    provider: str
    model: str | None
    placement: PlacementReport | None = None
    problem: str | None = None


@dataclass(frozen=True)
class InfoReport:
    """The report of ``info``.

    Attributes:
        python: version of the interpreter.
        platform: operating system and processor.
        packages: versions by package name; None for one that is not installed.
        layout_digest: row layout of this tq-onnx.
        cpu_features: SIMD extensions that numpy found in this CPU.
        providers: execution providers of onnxruntime.
        library: the operator library.
        provider: the provider that was asked for, and a model on it; None if nothing was asked.
    """

    python: str
    platform: str
    packages: dict[str, str | None]
    layout_digest: str
    cpu_features: tuple[str, ...]
    providers: tuple[str, ...]
    library: LibraryReport
    provider: ProviderReport | None = None

    @property
    def problems(self) -> list[str]:
        """The problems of the library, the provider and the model."""
        problems = (self.library.problem, self.provider.problem if self.provider else None)
        return [problem for problem in problems if problem is not None]


def inspect_installation(
    model: Path | None = None, ep: ExecutionProvider | None = None
) -> InfoReport:
    """Look at the installation; what is broken is a finding and not an error."""
    return InfoReport(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages=_packages(),
        layout_digest=layout_digest(),
        cpu_features=_cpu_features(),
        providers=available_providers(),
        library=_library(),
        provider=None if ep is None else _provider(ep, model),
    )


def _provider(ep: ExecutionProvider, model: Path | None) -> ProviderReport:
    where = None if model is None else str(model)
    try:
        placement = try_provider(ep) if model is None else open_placed(model, ep)
    except (LibraryError, UnsupportedModelError) as error:
        return ProviderReport(ep.provider, where, problem=str(error))
    problem = problem_of(placement)
    if problem is not None and where is not None:
        problem = f"{where}: {problem}"
    return ProviderReport(ep.provider, where, placement, problem)


def _library() -> LibraryReport:
    path = None
    try:
        path = str(get_library_path())
        facts = library_info()
    except LibraryError as error:
        return LibraryReport(path=path, problem=str(error))
    problem = None
    try:
        check_library()
    except LibraryError as error:
        problem = str(error)
    registers = problem is None
    if problem is None:
        problem = facts.problem
        if facts.isa is None:
            problem = "TQ_ONNX_ISA asks for a level that this library does not run here"
    return LibraryReport(
        path=path,
        version=facts.version,
        layout_digest=facts.layout_digest,
        isa=facts.isa,
        isa_compiled=facts.isa_compiled,
        isa_supported=facts.isa_supported,
        registers=registers,
        problem=problem,
    )


def _packages() -> dict[str, str | None]:
    """Return the versions by name, and which other package ONNX Runtime is from, if it is."""
    versions = {name: _version(name) for name in _PACKAGES}
    alternatives = {provider.package: _version(provider.package) for provider in PROVIDERS.values()}
    return {**versions, **{name: version for name, version in alternatives.items() if version}}


def _version(package: str) -> str | None:
    if package == "tq-onnx":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_features() -> tuple[str, ...]:
    try:
        extensions = np.show_config(mode="dicts")["SIMD Extensions"]
    except (KeyError, TypeError):
        return ()
    return (*extensions.get("baseline", ()), *extensions.get("found", ()))
