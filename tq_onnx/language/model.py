"""A language model, ready to use: prompts in, texts out, caches that callers keep.

``LanguageModel`` owns no cache and may be used by many threads; each text has a ``Cache`` of its
own. A prompt whose ids begin with those in its cache computes only the rest.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tq_onnx.errors import UsageError
from tq_onnx.integrations.huggingface import Tokenizer, load_tokenizer
from tq_onnx.integrations.tokens import missing_tokenizer, tokenizer_folder
from tq_onnx.language.batch import generate_batch
from tq_onnx.language.cache import Cache
from tq_onnx.language.cachefile import Identity, identity_of, read_cache, read_messages
from tq_onnx.language.call import Call
from tq_onnx.language.chat import Chat
from tq_onnx.language.engine import Engine
from tq_onnx.language.templates import ChatTemplate, Message, require_template
from tq_onnx.language.text import Completion, Piece, stop_strings
from tq_onnx.plan import METADATA_PLAN
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.sampling import Sampling

if TYPE_CHECKING:
    import onnxruntime

    from tq_onnx.plan import Plan
    from tq_onnx.runtime.signature import Signature

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, its token ids, or the turns of a conversation."""

MAX_NEW_TOKENS: Final = 256
"""Tokens that are generated at most where nobody says how many."""


class LanguageModel:
    """An original or a converted model; ``tq_onnx.load`` opens one.

    Args:
        opened: the model.
        context: tokens that each cache holds, updated in place; None for caches that grow, or for
            the room that the graph gives them.
        tokenizer: the folder of the tokenizer; None for the model's own.
    """

    def __init__(
        self, opened: OpenModel, *, context: int | None = None, tokenizer: Path | None = None
    ) -> None:
        """Take an open model; see the class for arguments."""
        opened.signature.capacity(context)  # refuses what the graph cannot do
        self.opened = opened
        self.context = context
        self._folder = tokenizer

    @property
    def path(self) -> Path:
        """The model file."""
        return self.opened.path

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The onnxruntime session."""
        return self.opened.session

    @property
    def signature(self) -> Signature:
        """The names and caches of the model."""
        return self.opened.signature

    @property
    def plan(self) -> Plan | None:
        """The conversion; None for an original."""
        return self.opened.plan

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return self.opened.vocabulary

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ModelFileError: there is none, or it cannot be read.
        """
        folder = self._tokenizer_folder
        if folder is None:
            raise missing_tokenizer(self.path)
        return load_tokenizer(folder)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            UnsupportedModelError: the model has none.
            ModelFileError: it cannot be read.
        """
        return require_template(self._tokenizer_folder or self.path.parent, self.path)

    @cached_property
    def identity(self) -> Identity:
        """The digests that tell the model from others."""
        plan_text = self.session.get_modelmeta().custom_metadata_map.get(METADATA_PLAN)
        return identity_of(self.path, self.opened.data, self.signature, plan_text)

    def decoder(self, **options: Any) -> Decoder:
        """Return a decoder with empty caches, which takes ids and gives logits.

        Args:
            options: as ``tq_onnx.runtime.model.OpenModel.decoder`` takes them; the capacity is the
                context unless one is given.
        """
        return self.opened.decoder(**{"capacity": self.context, **options})

    def new_cache(self) -> Cache:
        """Return an empty cache for one text."""
        return Cache(self.decoder(), lambda: self.identity)

    def load_cache(self, path: str | PathLike[str]) -> Cache:
        """Read a cache that ``Cache.save`` has written.

        Raises:
            ModelFileError: the file cannot be read, or is no cache.
            UsageError: it belongs to another model, or has more tokens than the context.
        """
        decoder = self.decoder()
        tokens, held = read_cache(
            Path(path),
            self.signature,
            decoder.snapshot(),
            self.identity,
            vocabulary=self.opened.vocabulary,
        )
        decoder.restore(held)
        return Cache(decoder, lambda: self.identity, tokens)

    def chat(self, system: str = "", *, cache: Cache | None = None) -> Chat:
        """Begin a conversation, which keeps one cache.

        Args:
            system: what the model is told first; empty for nothing.
            cache: the cache; a new one if None.

        Raises:
            UnsupportedModelError: the model has no chat template.
        """
        _ = self.template
        return Chat(self, system, self.new_cache() if cache is None else cache)

    def load_chat(self, path: str | PathLike[str]) -> Chat:
        """Go on with a conversation that ``Chat.save`` has written.

        Raises:
            UnsupportedModelError: the model has no chat template.
            ModelFileError: the file cannot be read, or holds no conversation.
            UsageError: it belongs to another model, or has more tokens than the context.
        """
        messages = read_messages(Path(path))
        chat = self.chat(cache=self.load_cache(path))
        chat.messages = messages
        return chat

    def stream(
        self,
        prompt: Prompt,
        *,
        cache: Cache | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generator[Piece, None, Completion]:
        """Continue a prompt piece by piece.

        Args:
            prompt: a text, its ids, or messages with ``role`` and ``content``.
            cache: the tokens that were read before; those with which the prompt begins are not
                read again, others are forgotten. None for an empty one.
            max_new_tokens: tokens at most; a cache that is full ends the text, too.
            sampling: the way to choose tokens; the most likely if None.
            stop: strings that end the text and are no part of it. So do the model's own end-of-text
                tokens.

        Yields:
            Text as soon as it is certain; the last piece has the reason of the end.

        Raises:
            UsageError: the prompt is empty, has unknown ids or does not fit into the cache, or the
                cache is in use.
            ModelFileError: there is no tokenizer, and the prompt is no list of ids.
        """
        call = self._call(prompt, max_new_tokens, sampling, stop)
        return call.pieces(self.new_cache() if cache is None else cache)

    def generate(
        self,
        prompt: Prompt,
        *,
        cache: Cache | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """Continue a prompt at once; see ``stream`` for arguments and errors."""
        call = self._call(prompt, max_new_tokens, sampling, stop)
        return call.completion(self.new_cache() if cache is None else cache)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        caches: Sequence[Cache] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Continue several prompts, together where each text is then what it would be alone.

        The graph has to take padding. Where caches keep their first tokens exactly (``sinks``),
        only prompts of one length go together: padding would take the place of those tokens. Each
        text has draws of its own, from the same seed. See ``stream`` for the arguments and errors.

        Args:
            prompts: what to continue.
            caches: one for each prompt, as for ``stream``. With exact windows texts that keep a
                cache are computed one after another.
            max_new_tokens: tokens of each text.
            sampling: the way to choose tokens.
            stop: texts that end a text.

        Raises:
            UsageError: there are not as many caches as prompts, or one is given twice; or one text
                was given in the place of a list.
        """
        if isinstance(prompts, str):
            raise UsageError("the prompts are one text", fix="give a list of texts")
        if caches is not None and len({id(one) for one in caches}) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts need as many caches, each another one")
        calls = [self._call(prompt, max_new_tokens, sampling, stop) for prompt in prompts]
        sinks = any(spec.window.sinks for spec in self.signature.caches)
        groups: dict[int, list[int]] = {}
        for index, call in enumerate(calls):
            groups.setdefault(len(call.ids) if sinks else 0, []).append(index)
        found: dict[int, Completion] = {}
        for group in groups.values():
            own = None if caches is None else [caches[index] for index in group]
            done = self._together([calls[index] for index in group], own)
            found.update(zip(group, done, strict=True))
        return [found[index] for index in range(len(calls))]

    def engine(
        self, *, max_length: int | None = None, alone: bool = False, threads: int | None = None
    ) -> Engine:
        """Open the model's folder on onnxruntime-genai, whose Engine computes many texts at a time.

        It opens the model once more, with weights of its own; ``tq_onnx.Engine(folder)`` does that
        without a model that is open already.

        Args:
            max_length: most tokens of a prompt and its answer, if fewer than the configuration
                allows.
            alone: whether to compute one text at a time.
            threads: of ONNX Runtime; None for what the configuration says, or all cores.

        Raises:
            ModelFileError: the model lies in no folder of onnxruntime-genai.
            EngineError: onnxruntime-genai is not installed, or does not open the folder.
        """
        return Engine(
            self.path.parent,
            max_length=max_length,
            alone=alone,
            threads=threads,
            tokenizer=self._folder,
        )

    def _together(self, calls: list[Call], caches: list[Cache] | None) -> list[Completion]:
        decoder = self.decoder()
        together = decoder.takes_padding and not self.signature.interface.states
        if caches is not None:
            # Texts that ended go on reading until all have: that overwrites their exact tokens.
            together &= not any(spec.window.overlay_rows for spec in self.signature.caches)
        if len(calls) < 2 or not together or decoder.rows not in (None, len(calls)):
            own = caches or [self.new_cache() for _ in calls]
            return [call.completion(cache) for call, cache in zip(calls, own, strict=True)]
        return generate_batch(self.decoder(batch=len(calls)), calls, caches)

    def _call(
        self, prompt: Prompt, max_new_tokens: int, sampling: Sampling | None, stop: Sequence[str]
    ) -> Call:
        self.opened.refuse_text()
        ids = self._ids(prompt)
        if not ids:
            raise UsageError("the prompt is empty", fix="give at least one token")
        self.opened.refuse_tokens(np.asarray(ids, np.int64))
        if max_new_tokens < 0:
            raise UsageError(f"{max_new_tokens} new tokens cannot be generated")
        # Who gives ids may do without a tokenizer.
        words = None if self._tokenizer_folder is None and not stop else self.tokenizer
        return Call(ids, words, max_new_tokens, sampling or Sampling(), stop_strings(stop))

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if len(prompt) and all(isinstance(each, Mapping) for each in prompt):
            text = self.template.render(prompt)  # type: ignore[arg-type]
            return self.tokenizer.encode(text, add_special_tokens=False)
        if not all(isinstance(each, (int, np.integer)) for each in prompt):
            raise UsageError("a prompt is a text, a list of token ids, or a list of messages")
        return [int(each) for each in prompt]  # type: ignore[arg-type]

    @cached_property
    def _tokenizer_folder(self) -> Path | None:
        return tokenizer_folder(self._folder, self.path)
