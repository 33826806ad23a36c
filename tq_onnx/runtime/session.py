"""ONNX Runtime sessions on one execution provider, and where their nodes really run.

A converted model carries its operators twice: as nodes that the library's kernels execute, and as
function bodies in standard ONNX that run wherever the library is not registered. ``make_session``
chooses; ``placement`` tells which of the two happened, from ONNX Runtime's own record of the
assignment and not from the absence of an error. ONNX Runtime before 1.24 (the newest for Python
3.10 is 1.23) keeps no such record; there a session counts as running what it was registered with.

Refused, in one sentence each: a file that is not a model, external data that is missing, a graph
that ONNX Runtime cannot build, a library that is missing or does not load, a provider that is
missing or does not load: ONNX Runtime itself would go on with the CPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import onnxruntime

from tq_onnx.errors import LibraryError, ModelFileError, UnsupportedModelError
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE, PAGED_ATTENTION, PAGED_ENCODE
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.runtime.errors import absent, load_error, message_of, not_loaded
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.runtime.variables import ISA, PRODUCTS, SKIP_BELOW, Variable

# ONNX Runtime prints errors in colours on stderr before it raises them; only the exception counts.
_LOG_FATAL: Final = 4
RECORD_ASSIGNMENT: Final = "session.record_ep_graph_assignment_info"
"""Configuration without which a session cannot tell where its nodes run; see ``placement``."""
_EXTERNAL_DATA_FOLDER: Final = "session.model_external_initializers_file_folder_path"
_WITHOUT_CODES: Final = "session.disable_quant_qdq"

_HAS_RECORD: Final = hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info")
_registered: MutableMapping[onnxruntime.InferenceSession, bool] = WeakKeyDictionary()
"""True if the library was registered, for sessions of an ONNX Runtime without a record."""


@dataclass(frozen=True)
class PlacedNode:
    """A node of a session's graph, after optimisation.

    Attributes:
        name: as in the file, or one that ONNX Runtime gave it.
        op_type: its operator.
        domain: of the operator.
        provider: the execution provider that runs it.
    """

    name: str
    op_type: str
    domain: str
    provider: str


@dataclass(frozen=True)
class Placement:
    """The providers of the nodes of a session's graph."""

    providers: tuple[str, ...]  #: names of the execution providers that were given nodes
    nodes: int  #: nodes after optimisation; 0 where ONNX Runtime keeps no record
    encode: int  #: ``TurboQuantEncode`` nodes that the library executes, paged ones included
    attention: int  #: ``TurboQuantDequantAttention`` nodes that the library executes, likewise
    #: each of the nodes; empty where ONNX Runtime keeps no record
    assigned: tuple[PlacedNode, ...] = ()

    @property
    def uses_library(self) -> bool:
        """True if TurboQuant nodes run as kernels; False if their bodies were inlined."""
        return self.encode + self.attention > 0


def make_session(
    model: Path | bytes,
    *,
    library: bool = True,
    threads: int | None = None,
    external_data: Path | None = None,
    memory_reuse: bool = True,
    exact: bool = False,
    keeps_codes: bool = True,
    ep: ExecutionProvider = CPU,
) -> onnxruntime.InferenceSession:
    """Open a model on one execution provider.

    Args:
        model: a file, or the bytes of a serialised model.
        library: whether the TurboQuant kernels are registered; without them the model's own
            function bodies run.
        threads: threads within an operator; None leaves the choice to ONNX Runtime.
        external_data: folder of the external data of a model given as bytes.
        memory_reuse: whether ONNX Runtime plans which buffers nodes share. The time of that plan
            grows with the square of the number of nodes: with the bodies of 24 layers 17 s of a
            session's 18. Buffers that are not shared are freed all the same.
        exact: whether the kernels multiply floats, whatever the environment says, and do not round
            queries and weights to 8 or 16 bits.
        keeps_codes: whether ONNX Runtime may multiply codes of DequantizeLinear as they are, for
            which it rounds what they are multiplied with; if not, it multiplies floats.
        ep: where it runs. Nodes that this provider does not claim run on the CPU, see
            ``placement``.

    Raises:
        LibraryError: the library or the provider is missing or does not load, or the library has
            another row layout.
        ModelFileError: the model or its external data is missing or not readable.
        UnsupportedModelError: ONNX Runtime cannot run this graph there.
    """
    if (missing := absent(ep)) is not None:
        raise missing
    if ep.oldest and not _HAS_RECORD:
        raise LibraryError(
            f"onnxruntime {onnxruntime.__version__} keeps no record of which nodes "
            f"{ep.provider} runs",
            fix=f"install {ep.package} {ep.oldest} or newer",
        )
    where = str(model) if isinstance(model, Path) else "the model"
    if isinstance(model, Path) and not model.is_file():
        raise ModelFileError("there is no such file", where=where, fix="check the path")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _LOG_FATAL
    options.add_session_config_entry(RECORD_ASSIGNMENT, "1")
    if external_data is not None:
        options.add_session_config_entry(_EXTERNAL_DATA_FOLDER, str(external_data))
    if not keeps_codes:
        options.add_session_config_entry(_WITHOUT_CODES, "1")
    options.enable_mem_reuse = memory_reuse
    if threads is not None:
        options.intra_op_num_threads = threads
    if library:
        register_library(options)
    source = str(model) if isinstance(model, Path) else model
    providers = [(ep.provider, dict(ep.options))]
    if ep.has_own_memory:
        providers.append((CPU.provider, {}))
        # A provider logs its errors by itself, and not by the session.
        onnxruntime.set_default_logger_severity(_LOG_FATAL)
    try:
        with setting(PRODUCTS, "float") if exact else nullcontext():
            session = onnxruntime.InferenceSession(
                source,
                options,
                providers=providers,
                disabled_optimizers=list(ep.disabled_optimizers) or None,
                enable_fallback=0,
            )
    except Exception as error:
        raise load_error(error, where, ep) from error
    if ep.provider not in session.get_providers():
        raise not_loaded(ep)
    if not _HAS_RECORD:
        _registered[session] = library
    return session


@contextmanager
def setting(variable: Variable, value: str) -> Iterator[None]:
    """Set a variable while a session is made, which is when kernels read it."""
    before = os.environ.get(variable.name)
    os.environ[variable.name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable.name]
        else:
            os.environ[variable.name] = before


def placement(session: onnxruntime.InferenceSession) -> Placement:
    """Tell where the nodes of a session made by ``make_session`` run."""
    if not _HAS_RECORD:
        return _registered_placement(session)
    providers: set[str] = set()
    assigned: list[PlacedNode] = []
    for subgraph in session.get_provider_graph_assignment_info():
        providers.add(subgraph.ep_name)
        assigned += (
            PlacedNode(node.name, node.op_type, node.domain, subgraph.ep_name)
            for node in subgraph.get_nodes()
        )
    op_types = [node.op_type for node in assigned if node.domain == DOMAIN]
    return Placement(
        tuple(sorted(providers)),
        len(assigned),
        op_types.count(ENCODE) + op_types.count(PAGED_ENCODE),
        op_types.count(ATTENTION) + op_types.count(PAGED_ATTENTION),
        tuple(assigned),
    )


def _registered_placement(session: onnxruntime.InferenceSession) -> Placement:
    text = session.get_modelmeta().custom_metadata_map.get(METADATA_PLAN)
    layers = len(Plan.from_json(text).layers) if text and _registered.get(session) else 0
    return Placement(tuple(session.get_providers()), 0, 2 * layers, layers)


@dataclass(frozen=True)
class Port:
    """An input or output of a graph; dimensions are numbers, names or None."""

    name: str
    type: str
    shape: tuple[int | str | None, ...]

    def __str__(self) -> str:
        """Return the text for messages: ``tensor(float)[batch, 2, past, 64]``."""
        return f"{self.type}[{', '.join(map(str, self.shape))}]"


def ports(session: onnxruntime.InferenceSession) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Return inputs and outputs of a session, in the graph's order."""
    inputs, outputs = (
        tuple(Port(entry.name, entry.type, tuple(entry.shape)) for entry in side)
        for side in (session.get_inputs(), session.get_outputs())
    )
    return inputs, outputs


def vocabulary_size(session: onnxruntime.InferenceSession, logits: str) -> int:
    """Return the last dimension of the logits."""
    shapes = {entry.name: entry.shape for entry in session.get_outputs()}
    size = shapes[logits][-1] if shapes.get(logits) else None
    if not isinstance(size, int):
        raise UnsupportedModelError("the graph does not state the vocabulary size", where=logits)
    return size


def check_library() -> None:
    """Register the library with a session that is never opened."""
    register_library(onnxruntime.SessionOptions())


def available_providers() -> tuple[str, ...]:
    """Return execution providers of the installed ONNX Runtime, in its order of preference."""
    return tuple(onnxruntime.get_available_providers())


def registered_options() -> onnxruntime.SessionOptions:
    """Return session options with the operator library registered; see ``register_library``."""
    options = onnxruntime.SessionOptions()
    register_library(options)
    return options


def register_library(options: Any) -> None:
    """Register the library with the options of a session."""
    from tq_onnx.runtime.library import get_library_path, library_info

    path = get_library_path()
    info = library_info()  # refuses another row layout
    if info.isa is None:
        raise LibraryError(
            f"{ISA.name} is {os.environ.get(ISA.name)!r}, which this processor or this "
            "library does not run",
            where=str(path),
            fix=f"unset it, or use one of {', '.join(info.isa_supported)}",
        )
    _refuse_values(path)
    _warn_once(info.problem)
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:
        raise LibraryError(
            f"onnxruntime {onnxruntime.__version__} cannot load the library: {message_of(error)}",
            where=str(path),
            fix="reinstall tq-onnx, or use onnxruntime 1.24 or newer",
        ) from error


@cache
def _warn_once(problem: str | None) -> None:
    if problem is not None:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)


def _refuse_values(path: Path) -> None:
    """Refuse values that the kernels would, which ONNX Runtime blames on the graph."""
    products = os.environ.get(PRODUCTS.name)
    if products and products not in ("8", "float"):
        removed = ", which was removed" if products == "16" else ""
        raise LibraryError(
            f"{PRODUCTS.name} is {products!r}{removed}",
            where=str(path),
            fix="unset it, or use 8 or float",
        )
    below = os.environ.get(SKIP_BELOW.name)
    try:
        fits = not below or 0 <= float(below) < 1
    except ValueError:
        fits = False
    if not fits:
        raise LibraryError(
            f"{SKIP_BELOW.name} is {below!r}",
            where=str(path),
            fix="unset it, or use a number from 0 to below 1",
        )
