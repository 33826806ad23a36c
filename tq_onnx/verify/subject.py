"""Opens an original or a converted model, ready to run.

A converted model tells its names and caches by the plan in its metadata; an original is recognised
by the converter's own dialects, so that both are driven by the same decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.plan import METADATA_PLAN, CachePair, Plan
from tq_onnx.runtime.cache import cache_spec
from tq_onnx.runtime.decoder import Decoder, Signature, plan_of, signature_of
from tq_onnx.runtime.session import make_session, vocabulary_size


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with an open session.

    Attributes:
        path: the model file.
        session: the onnxruntime session.
        signature: names, caches and, for a converted model, the plan.
    """

    path: Path
    session: Any
    signature: Signature

    @property
    def plan(self) -> Plan | None:
        """The conversion; None for an original."""
        return self.signature.plan

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return vocabulary_size(self.session, self.signature.interface.logits)

    def decoder(
        self, *, batch: int = 1, capacity: int | None = None, watch: tuple[str, ...] = ()
    ) -> Decoder:
        """A decoder with empty caches."""
        return Decoder(
            self.session,
            self.signature,
            batch=batch,
            capacity=capacity,
            watch=watch,
            where=str(self.path),
        )


def open_subject(path: Path, *, library: bool = True, threads: int | None = None) -> Subject:
    """Opens a model.

    Args:
        path: the model file.
        library: whether a converted model runs on the library's kernels; if not, on its bodies.
        threads: threads within an operator.

    Raises:
        TqOnnxError: the file, the library or the graph is refused, see ``make_session``; an
            original is also refused if its attention is not recognised.
    """
    from tq_onnx.graph.load import load

    loaded = load(path)  # refuses what is no model, before onnxruntime sees it
    converted = METADATA_PLAN in loaded.model.metadata_props
    session = make_session(loaded.path, library=library and converted, threads=threads)
    plan = plan_of(session)
    if plan is not None:
        return Subject(loaded.path, session, signature_of(session, plan))
    return Subject(loaded.path, session, _recognised(loaded.model, session, path))


def open_converted(path: Path, *, library: bool = True, threads: int | None = None) -> Subject:
    """As ``open_subject``, for a model that must be a converted one."""
    subject = open_subject(path, library=library, threads=threads)
    if subject.plan is None:
        raise UnsupportedModelError(
            "this model was not converted by tq-onnx", where=str(path), fix="convert it first"
        )
    return subject


def open_original(path: Path, *, threads: int | None = None) -> Subject:
    """As ``open_subject``, for a model that must not be a converted one."""
    subject = open_subject(path, library=False, threads=threads)
    if subject.plan is not None:
        raise UnsupportedModelError(
            "this model is a converted one already",
            where=str(path),
            fix="give the original first and the converted model second",
        )
    return subject


def _recognised(model: Any, session: Any, path: Path) -> Signature:
    from tq_onnx.graph.match import recognise

    found = recognise(model)
    if found.misses or found.interface is None:
        reason = str(found.misses[0]) if found.misses else "its inputs are not a decoder's"
        raise UnsupportedModelError(
            f"this is not a decoder that tq-onnx knows how to run: {reason}",
            where=str(path),
            fix="see `tq-onnx inspect`",
        )
    caches = [
        cache_spec(
            session,
            CachePair(str(cache.past.name), str(cache.present.name)),
            kv_num_heads=site.kv_num_heads,
            head_size=site.head_size,
        )
        for site in found.sites
        for cache in (site.key, site.value)
    ]
    # Only attention that is told how many tokens count may find more room than that in its cache.
    fixed = all(site.counts_tokens for site in found.sites)
    return Signature(found.interface, tuple(caches), fixed)
