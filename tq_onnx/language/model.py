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

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.integrations.huggingface import Tokenizer, load_tokenizer
from tq_onnx.integrations.tokens import missing_tokenizer, tokenizer_folder
from tq_onnx.language.cache import Cache
from tq_onnx.language.cachefile import Identity, SavedCache, identity_of, read_cache
from tq_onnx.language.call import Call
from tq_onnx.language.chat import Chat
from tq_onnx.language.engine import Engine
from tq_onnx.language.promptstore import PromptStore, refuse_model
from tq_onnx.language.templates import ChatTemplate, Message, require_template
from tq_onnx.language.text import Completion, Piece, stop_strings
from tq_onnx.plan import METADATA_PLAN
from tq_onnx.runtime import arguments
from tq_onnx.runtime.bits import bits_of
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.sampling import Sampling
from tq_onnx.version import __version__

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
        prompt_store: where ``stream``, ``generate`` and conversations find what was read of a
            prompt before, and keep it; None for nowhere.

    Raises:
        UnsupportedModelError: there is a ``prompt_store``, and the model does not read prompts call
            by call; or a context, and its caches can only grow.
    """

    def __init__(
        self,
        opened: OpenModel,
        *,
        context: int | None = None,
        tokenizer: Path | None = None,
        prompt_store: PromptStore | None = None,
    ) -> None:
        """Take an open model; see the class for arguments and errors."""
        capacity = opened.signature.capacity(context)  # refuses what the graph cannot do
        self.opened = opened
        self.context = context
        self._folder = tokenizer
        room = (size for size in (capacity, opened.positions) if size is not None)
        self._room = min(room, default=None)
        self._files = {file: _version_of(file) for file in (opened.path, *sorted(opened.data))}
        self._prompts = prompt_store
        if prompt_store is not None:
            arguments.instance(prompt_store, PromptStore, "prompt_store")
            refuse_model(opened)

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
        """Digests that identify the model.

        Raises:
            ModelFileError: its files have changed since it was opened.
        """
        if any(_version_of(file) != version for file, version in self._files.items()):
            raise ModelFileError(
                "the files have changed since the model was opened, and a saved cache names them",
                where=str(self.path),
                fix="open it again",
            )
        plan_text = self.session.get_modelmeta().custom_metadata_map.get(METADATA_PLAN)
        return identity_of(tuple(self._files), self.signature, plan_text)

    def decoder(self, **options: Any) -> Decoder:
        """Return a decoder with empty caches, which takes ids and gives logits.

        Args:
            options: as ``tq_onnx.runtime.model.OpenModel.decoder`` takes them; the capacity is the
                context unless one is given.
        """
        return self.opened.decoder(**{"capacity": self.context, **options})

    def new_cache(self) -> Cache:
        """Return an empty cache for one text."""
        return Cache(self.decoder(), self)

    def load_cache(self, path: str | PathLike[str]) -> Cache:
        """Read a cache that ``Cache.save`` has written.

        Raises:
            ModelFileError: the file cannot be read, or is no cache.
            UsageError: it belongs to another model, or has more tokens than the context.
        """
        return self._loaded(arguments.path(path, "path"))[0]

    def chat(self, system: str = "", *, cache: Cache | None = None) -> Chat:
        """Begin a conversation with a cache of its own.

        Args:
            system: the system message; empty for none.
            cache: the cache; a new one if None.

        Raises:
            UnsupportedModelError: the model has no chat template.
            UsageError: the cache belongs to another model.
        """
        _ = self.template
        return Chat(self, system, self._cache(cache))

    def load_chat(self, path: str | PathLike[str]) -> Chat:
        """Continue a conversation that ``Chat.save`` has written.

        Raises:
            UnsupportedModelError: the model has no chat template.
            ModelFileError: the file cannot be read, or holds no conversation.
            UsageError: it belongs to another model, or has more tokens than the context.
        """
        file = arguments.path(path, "path")
        _ = self.template
        cache, saved = self._loaded(file)
        if not saved.messages:
            raise ModelFileError(
                "the file holds no conversation",
                where=str(file),
                fix="save it again with Chat.save",
            )
        chat = self.chat(cache=cache)
        chat.messages = saved.messages
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
            UsageError: the prompt is empty, has unknown ids or does not fit into the cache, another
                argument is none, or the cache is in use or of another model.
            ModelFileError: there is no tokenizer, and the prompt is no list of ids.
            UnsupportedModelError: the model fails, or gives logits that are not finite. What was
                read before that stays in the cache.
        """
        call = self._call(prompt, max_new_tokens, sampling, stop)
        return call.stream(self._cache(cache))

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
        held = self._cache(cache)
        with held.in_use():
            return call.completion(held)

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

    def _call(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[str],
    ) -> Call:
        """Check all arguments of a call but its cache."""
        self.opened.refuse_text()
        most = arguments.count(max_new_tokens, "max_new_tokens")
        draws = Sampling() if sampling is None else sampling
        arguments.instance(draws, Sampling, "sampling")
        stops = stop_strings(stop)
        ids = arguments.token_ids(self._tokens(prompt), self.vocabulary, "prompt")
        if self._room is not None:
            if len(ids) > self._room:
                raise UsageError(
                    f"the prompt has {len(ids)} tokens, and the cache holds {self._room}",
                    fix="open the model with a larger context, or shorten the prompt",
                )
            most = min(most, self._room - len(ids) + 1)  # the last one is not cached
        # Who gives ids may do without a tokenizer.
        words = None if self._tokenizer_folder is None and not stops else self.tokenizer
        read = None if self._prompts is None else self._read
        return Call(ids, words, most, draws, stops, read)

    def _read(self, cache: Cache, ids: list[int], shared: int) -> int:
        """Read the beginning of a prompt, from the store as far as it has it; see ``Call.read``."""
        assert self._prompts is not None
        decoder = cache.decoder
        identity = repr((self._computation, decoder.capacity is None, decoder.in_place))
        return self._prompts.read(cache, ids, identity, self.vocabulary, shared)

    @cached_property
    def _computation(self) -> tuple[object, ...]:
        """All that decides about the bits of a cache beside the tokens and the form of the cache.

        Of files that are not hashed as a whole, the time of the last change counts, too.
        """
        versions = [(_version_of(file) or ())[1:] for file in self._files]
        return self.identity, versions, __version__, bits_of(self.session)

    def _tokens(self, prompt: Prompt) -> Sequence[object]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and any(isinstance(each, Mapping) for each in prompt):
            text = self.template.render(prompt)  # type: ignore[arg-type]
            return self.tokenizer.encode(text, add_special_tokens=False)
        return prompt

    def _cache(self, cache: Cache | None) -> Cache:
        """Return the cache of a call: a new one for None."""
        if cache is None:
            return self.new_cache()
        arguments.instance(cache, Cache, "cache").refuse_other(self)
        return cache

    def _loaded(self, path: Path) -> tuple[Cache, SavedCache]:
        """Return the cache in a file, and what else the file holds."""
        decoder = self.decoder()
        saved = read_cache(
            path, self.signature, decoder.snapshot(), self.identity, vocabulary=self.vocabulary
        )
        decoder.restore(saved.held)
        return Cache(decoder, self, saved.tokens), saved

    @cached_property
    def _tokenizer_folder(self) -> Path | None:
        return tokenizer_folder(self._folder, self.path)


def _version_of(file: Path) -> tuple[int, ...] | None:
    """Return what changes with the content of a file; None if there is no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
