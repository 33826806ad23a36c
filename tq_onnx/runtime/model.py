"""Open an original or a converted model, ready to run.

A converted model tells its names and caches by the plan in its metadata; an original is recognised
by the converter's own dialects, so that both are driven by the same decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.conversion.target import PROMPT_FILE, STEP_FILE
from tq_onnx.errors import UnsupportedModelError, UsageError, located
from tq_onnx.plan import ENCODER, METADATA_PLAN, CachePair, Interface, Plan, plan_in
from tq_onnx.runtime.cache import cache_spec
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.graphs import check_pair
from tq_onnx.runtime.placement import refuse_misplaced
from tq_onnx.runtime.providers import CPU, ExecutionProvider, provider_of
from tq_onnx.runtime.session import make_session, ports, vocabulary_size
from tq_onnx.runtime.signature import Signature, plan_of, signature_of
from tq_onnx.targets.registry import target_of_plan

if TYPE_CHECKING:
    from tq_onnx.files.load import LoadedModel
    from tq_onnx.recognise.match import Recognition

_MADE_UP_ROWS: Final = 1024
_MADE_UP_SIZE: Final = 0.02


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model with an open session.

    Attributes:
        path: the model file.
        session: the onnxruntime session.
        signature: names, caches and, for a converted model, the plan.
        recognition: what was found in an original; None for a converted model.
        first: the graph of first prompts, whose caches this one goes on with; None if it takes
            them itself.
        data: the files of its external data.
        positions: tokens that its tables of positions have rows for; None if none is known.
        wide: a graph of fixed sizes that takes more tokens a call, with the same caches; None if
            there is none.
    """

    path: Path
    session: Any
    signature: Signature
    recognition: Recognition | None = None
    first: OpenModel | None = None
    data: tuple[Path, ...] = ()
    positions: int | None = None
    wide: OpenModel | None = None

    @property
    def plan(self) -> Plan | None:
        """The conversion; None for an original."""
        return self.signature.plan

    @property
    def vocabulary(self) -> int:
        """Number of token ids that may be fed and predicted."""
        interface = self.signature.interface
        sizes = [vocabulary_size(self.session, interface.logits)]
        made_up = made_up_embeddings(self.session, interface)
        if made_up is not None:
            sizes.append(len(made_up))
        if interface.vocabulary is not None:
            sizes.append(interface.vocabulary)
        return min(sizes)

    @property
    def room(self) -> int | None:
        """Tokens that the graph takes in all; None for any number."""
        signature = self.signature
        inputs, _ = ports(self.session)
        (tokens,) = (port for port in inputs if port.name == signature.interface.tokens)
        once = tokens.shape[1] if signature.first_only else None
        return once if isinstance(once, int) else signature.slots

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text, by the graph's caches and its tables of positions."""
        return min((size for size in (self.room, self.positions) if size is not None), default=None)

    def refuse_encoder(self) -> None:
        """Refuse models whose logits depend on more than tokens, which decoders here make up.

        Raises:
            UnsupportedModelError: it takes what an encoder makes.
        """
        models = (self,) if self.first is None else (self.first, self)
        fed = (one for model in models for one in model.signature.interface.fed)
        made = next((one.name for one in fed if one.role == ENCODER), None)
        if made is not None:
            raise UnsupportedModelError(
                f"the model goes on from what an encoder makes ({made}), not from a text alone",
                where=str(self.path),
                fix="run it with what runs its encoder; verify, report and bench make that up",
            )

    def refuse_pages(self) -> None:
        """Refuse a model whose caches lie in pages, which the decoders here do not feed.

        Raises:
            UnsupportedModelError: it has such caches.
        """
        if self.plan is not None:
            with located(self.path):
                refuse_pages(self.plan)

    def refuse_text(self) -> None:
        """Refuse models that do not go from token ids to logits.

        Raises:
            UnsupportedModelError: it takes embeddings or what an encoder makes, or gives hidden
                states.
        """
        self.refuse_pages()
        self.refuse_encoder()
        interface = self.signature.interface
        if made_up_embeddings(self.session, interface) is not None:
            raise UnsupportedModelError(
                f"the model takes embeddings ({interface.tokens}), not tokens",
                where=str(self.path),
                fix="export it with its embedding table",
            )
        if interface.hidden:
            raise UnsupportedModelError(
                f"the model gives hidden states ({interface.logits}), not logits",
                where=str(self.path),
                fix="export it with its output projection",
            )

    def refuse_tokens(self, tokens: npt.NDArray[np.int64]) -> None:
        """Refuse ids that the model does not know.

        Raises:
            UsageError: there are such ids.
        """
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise UsageError(
                f"token ids reach from {tokens.min()} to {tokens.max()}, but the model knows "
                f"{self.vocabulary}",
                fix="give the tokenizer that belongs to the model",
            )

    def refuse_prompt(self, tokens: Sequence[int]) -> None:
        """Refuse a prompt with ids that the model does not know.

        Raises:
            UsageError: its tokenizer is not that of the model.
        """
        known = self.vocabulary
        strange = next((token for token in tokens if not 0 <= token < known), None)
        if strange is not None:
            raise UsageError(
                f"the tokenizer gives token {strange}, but the model knows {known}",
                where=str(self.path),
                fix="name the folder of its own tokenizer with --tokenizer",
            )

    def capacity_for(
        self, prompt_tokens: int, new_tokens: int, *, asked: int | None = None
    ) -> int | None:
        """Return the tokens that caches have to hold to continue a prompt.

        Args:
            prompt_tokens: tokens of the prompt.
            new_tokens: tokens to generate after it.
            asked: a capacity that was asked for.

        Returns:
            The capacity; None for caches that grow.

        Raises:
            UsageError: the capacity that was asked for, or the graph's capacity, is too small.
        """
        needed = prompt_tokens + new_tokens
        capacity = asked or self.room
        if capacity is None:
            fixed = self.signature.fixed_capacity and self.first is None
            return needed if fixed else None
        if capacity < needed - 1:  # the last token is not cached
            raise UsageError(
                f"{prompt_tokens} prompt tokens and {new_tokens} new ones need a capacity of "
                f"{needed - 1}, not {capacity}",
                fix="give fewer --max-new-tokens"
                if self.room
                else "give a larger --capacity or fewer --max-new-tokens",
            )
        return capacity

    def decoder(
        self,
        *,
        batch: int = 1,
        capacity: int | None = None,
        alias: bool | None = None,
        watch: tuple[str, ...] = (),
        first: OpenModel | None = None,
        most: int | None = None,
    ) -> Decoder:
        """Return a decoder with empty caches; one that takes embeddings gets made-up ones.

        ``first`` is a graph for first prompts whose caches this one continues, by default that of
        the same file; ``most`` is the capacity of caches that cannot grow because they are on a
        device.
        """
        # The branch of a merged model that takes caches was traced with one token, and may lack the
        # mask between several.
        self.refuse_pages()
        merged = first is None and self.first is not None
        first = first or self.first
        if capacity is None and provider_of(self.session).has_own_memory:
            capacity = self.signature.slots or most
        return Decoder(
            self.session,
            self.signature,
            batch=batch,
            capacity=capacity,
            alias=alias,
            watch=watch,
            where=str(self.path),
            embeddings=made_up_embeddings(self.session, self.signature.interface),
            first=None if first is None else (first.session, first.signature),
            wide=None if self.wide is None else (self.wide.session, self.wide.signature),
            one_by_one=merged,
            positions=self.positions,
        )


def made_up_embeddings(session: Any, interface: Interface) -> npt.NDArray[np.float32] | None:
    """Return random rows in place of a table that a graph does without; None if it takes token ids.

    Always the same, so that two models can be compared, and of a trained table's magnitude.
    """
    inputs, _ = ports(session)
    (tokens,) = (port for port in inputs if port.name == interface.tokens)
    width = tokens.shape[-1]
    if len(tokens.shape) != 3 or not isinstance(width, int):
        return None
    draws = np.random.default_rng(0).standard_normal((_MADE_UP_ROWS, width))
    return (_MADE_UP_SIZE * draws).astype(np.float32)


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
        path: the model file; errors name it.
        loaded: the graph of this file, if it was read already. If it is a part of a merged model,
            that alone is opened.
        library: whether a converted model runs on the library's kernels; if not, on its bodies.
        threads: threads within an operator.
        exact: whether the kernels multiply floats, see ``make_session``.
        ep: where it runs, and all of it.

    Raises:
        TqOnnxError: the file, the library, the provider or the graph is refused, see
            ``make_session``; an original is also refused if its attention is not recognised, and
            a model if the provider would leave nodes to the CPU.
    """
    from tq_onnx.files.load import load
    from tq_onnx.recognise.branches import split
    from tq_onnx.recognise.positions import table_positions

    if ep.has_own_memory and not ep.compiles and not library:
        raise UsageError(
            f"function bodies are not what {ep.provider} runs",
            fix="use the library, or leave out --ep",
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
    converted = METADATA_PLAN in loaded.model.metadata_props
    if ep.compiles:
        _expect_graph(loaded, path, ep)
    session = session_of(
        loaded,
        library=library and converted and not ep.compiles,
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
        signature, found = signature_of(session, plan), None
    else:
        from tq_onnx.recognise.match import recognise

        found = recognise(loaded.model)
        signature = _recognised(found, session, path)
    positions = table_positions(loaded.model, signature.interface)
    wide = _wide(path, signature, library=library, threads=threads, exact=exact, ep=ep)
    return OpenModel(
        loaded.path, session, signature, found, first, loaded.external_files, positions, wide
    )


def _expect_graph(loaded: LoadedModel, path: Path, ep: ExecutionProvider) -> None:
    """Refuse a model that a provider cannot compile; it would not say so itself."""
    with located(path):
        plan = plan_in(loaded.model.metadata_props)
        if plan is None or target_of_plan(plan).provider != ep.name:
            raise UnsupportedModelError(
                f"the model is no graph for --ep {ep.name}", where=str(path), fix=ep.export
            )


def _wide(
    path: Path,
    signature: Signature,
    *,
    library: bool,
    threads: int | None,
    exact: bool,
    ep: ExecutionProvider,
) -> OpenModel | None:
    """Open the graph for pieces of prompts beside one for steps; None if there is none."""
    plan, beside = signature.plan, path.with_name(PROMPT_FILE)
    fixed = plan is not None and target_of_plan(plan).has_fixed_sizes
    if not fixed or path.name != STEP_FILE or not beside.is_file():
        return None
    wide = open_converted(beside, library=library, threads=threads, exact=exact, ep=ep)
    with located(beside):
        check_pair(wide.plan, plan, what="the graph for pieces of prompts and the one for steps")
        if wide.signature.slots != signature.slots:
            raise UsageError(
                f"the capacity is {wide.signature.slots}, and that of {path.name} "
                f"{signature.slots}",
                fix="convert both with the same --capacity",
            )
    return wide


def refuse_pages(plan: Plan) -> None:
    """Refuse a model whose caches lie in pages, which the decoders here do not feed.

    Raises:
        UnsupportedModelError: it has such caches.
    """
    if plan.block_size:
        raise UnsupportedModelError(
            "the caches of the model lie in pages, and a call takes packed requests",
            fix="run it with tq_onnx.Engine, or take the conversion without --paged, which has the "
            "same rows",
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
        path: the original; errors name it.
        preset: a name in ``codec.presets.PRESETS``.
        loaded: the graph of this file, if it was read already; the conversion changes it.
        library: whether the model runs on the library's kernels; if not, on its bodies.
        threads: threads within an operator.

    Raises:
        TqOnnxError: as ``tq_onnx.conversion.pipeline.convert`` and ``open_model``.
    """
    import onnx_ir as ir

    from tq_onnx.conversion.original import recognise_original
    from tq_onnx.conversion.pipeline import prepare
    from tq_onnx.recognise.branches import load_decoder

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


def _recognised(found: Recognition, session: Any, path: Path) -> Signature:
    if found.misses or found.interface is None:
        reason = str(found.misses[0]) if found.misses else "the inputs are not a decoder's"
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
        )
        for site in found.sites
        for role, cache in (("key", site.key), ("value", site.value))
    ]
    # Only attention that is told how many tokens count may find more room than that in its cache.
    fixed = found.fixed_capacity and all(site.counts_tokens for site in found.sites)
    return Signature(found.interface, tuple(caches), fixed)
