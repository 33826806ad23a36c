"""Open a model file: its session and its signature.

A converted model tells its names and caches by the plan in its metadata; an original is recognised
by the converter's own dialects, so that both are driven by the same decoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tq_onnx.errors import LibraryError, UnsupportedModelError, UsageError, located
from tq_onnx.ops.operators import PagedEncode
from tq_onnx.plan import METADATA_PLAN, CachePair
from tq_onnx.runtime.cache import cache_spec
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.placement import refuse_misplaced
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.runtime.session import make_session
from tq_onnx.runtime.signature import Signature, plan_of, signature_of
from tq_onnx.targets.registry import target_of_plan

if TYPE_CHECKING:
    from tq_onnx.files.load import LoadedModel
    from tq_onnx.recognise.match import Recognition


def open_model(
    path: Path,
    *,
    loaded: LoadedModel | None = None,
    library: bool = True,
    threads: int | None = None,
    exact: bool = False,
    ep: ExecutionProvider = CPU,
) -> OpenModel:
    """Open a model.

    Args:
        loaded: the graph of this file, if it was read already. If it is a part of a merged model,
            that alone is opened.
        library: whether a converted model runs on the library's kernels; if not, on its bodies,
            which caches in pages have none of.
        ep: where it runs, and all of it.
    """
    from tq_onnx.conversion.branches import split
    from tq_onnx.files.load import load
    from tq_onnx.recognise.positions import table_positions

    if ep.has_own_memory and not library:
        raise UsageError(
            f"function bodies are not what {ep.provider} runs",
            fix="use the library, or leave out `ep`",
        )
    first = None
    if loaded is None:
        loaded = load(path)  # refuses what is no model, before onnxruntime sees it
        parts = split(loaded)
        if parts is not None:
            loaded = parts.following
            first = open_model(
                path, loaded=parts.first, library=library, threads=threads, exact=exact, ep=ep
            )
    if not library and PagedEncode.nodes(loaded.model.graph):
        raise LibraryError(
            "caches in pages run on the operator library only",
            where=str(path),
            fix="leave `library=False` out",
        )
    converted = METADATA_PLAN in loaded.model.metadata_props
    session = session_of(
        loaded,
        library=library and converted,
        threads=threads,
        memory_reuse=library or not converted,
        exact=exact,
        ep=ep,
    )
    if ep.has_own_memory:
        refuse_misplaced(session, loaded.model, path)
    with located(path):
        plan = plan_of(session)
        if plan is not None:
            target_of_plan(plan)
    if plan is not None:
        signature, recognition = signature_of(session, plan), None
    else:
        from tq_onnx.recognise.match import recognise

        recognition = recognise(loaded.model)
        signature = _recognised(recognition, session, path)
    positions = table_positions(loaded.model, signature.interface)
    return OpenModel(
        loaded.path, session, signature, recognition, first, loaded.external_files, positions
    )


def session_of(
    loaded: LoadedModel,
    *,
    library: bool,
    threads: int | None = None,
    memory_reuse: bool = True,
    exact: bool = False,
    ep: ExecutionProvider = CPU,
) -> Any:
    """Open what was loaded: its file, or the part of a merged file; see ``make_session``."""
    import onnx_ir as ir

    part = bool(loaded.branch)
    return make_session(
        ir.to_proto(loaded.model).SerializeToString() if part else loaded.path,
        library=library,
        threads=threads,
        external_data=loaded.path.parent if part else None,
        memory_reuse=memory_reuse,
        exact=exact,
        ep=ep,
    )


def open_converted(
    path: Path,
    *,
    loaded: LoadedModel | None = None,
    library: bool = True,
    threads: int | None = None,
    exact: bool = False,
    ep: ExecutionProvider = CPU,
) -> OpenModel:
    """Open a model that must be a converted one; see ``open_model``."""
    model = open_model(path, loaded=loaded, library=library, threads=threads, exact=exact, ep=ep)
    if model.plan is None:
        raise UnsupportedModelError(
            "this model was not converted by tq-onnx", where=str(path), fix="convert it first"
        )
    return model


def open_conversion(
    path: Path,
    *,
    preset: str,
    loaded: LoadedModel | None = None,
    library: bool = True,
    threads: int | None = None,
) -> OpenModel:
    """Convert an original and open the result, of which nothing is written to disk.

    Args:
        loaded: the graph of this file, if it was read already; the conversion changes it.
    """
    import onnx_ir as ir

    from tq_onnx.conversion.branches import load_decoder
    from tq_onnx.conversion.original import recognise_original
    from tq_onnx.conversion.pipeline import prepare

    read = recognise_original(loaded or load_decoder(path), path)
    prepared = prepare(path, preset=preset, original=read)
    session = make_session(
        ir.to_proto(prepared.loaded.model).SerializeToString(),
        library=library,
        threads=threads,
        external_data=prepared.loaded.path.parent,
        memory_reuse=library,
    )
    return OpenModel(path, session, signature_of(session, prepared.plan))


def open_original(
    path: Path, *, loaded: LoadedModel | None = None, threads: int | None = None
) -> OpenModel:
    """Open a model that must not be a converted one; see ``open_model``."""
    model = open_model(path, loaded=loaded, library=False, threads=threads)
    if model.plan is not None:
        raise UnsupportedModelError(
            "this model is a converted one already",
            where=str(path),
            fix="give the original first and the converted model second",
        )
    return model


def _recognised(recognition: Recognition, session: Any, path: Path) -> Signature:
    if recognition.misses or recognition.interface is None:
        reason = (
            str(recognition.misses[0]) if recognition.misses else "the inputs are not a decoder's"
        )
        raise UnsupportedModelError(
            f"tq-onnx cannot run this model: {reason}",
            where=str(path),
            fix="see `tq-onnx inspect`",
        )
    caches = [
        cache_spec(
            session,
            CachePair(None if cache.past is None else cache.past.name, cache.present.name or ""),
            kv_num_heads=site.kv_num_heads,
            head_size=site.size_of(role),
            # Buffers that have room for all tokens are rings that drop none, at any length.
            spare_rows=site.sliding_window if site.ring else 0,
        )
        for site in recognition.sites
        for role, cache in (("key", site.key), ("value", site.value))
    ]
    # Only attention that is told how many tokens count may find more room than that in its cache.
    fixed = recognition.fixed_capacity and all(site.counts_tokens for site in recognition.sites)
    return Signature(recognition.interface, tuple(caches), fixed)
