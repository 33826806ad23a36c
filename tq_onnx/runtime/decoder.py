"""A decoder with its caches: prefill, decode, growing or of fixed capacity.

A ``Decoder`` feeds tokens to a model with a known ``Signature`` and keeps the caches of one batch:

- growing: every call's ``present`` outputs are the next call's ``past`` inputs; a graph that does
  not grow its caches is given larger ones before each call;
- fixed capacity: one buffer per cache is bound as past and as present, and the kernels write the
  new rows into it. Where the function bodies run instead of the kernels, past and present are two
  buffers that change places, because standard operators may not write what they still read.

Caches in pages are updated in place, too, and get further pages if they have no capacity; a call
packs the tokens of all sequences.

States of recurrent layers are fed back like growing caches, whatever becomes of the caches.

A session of a provider with memory of its own has its caches there, always of fixed capacity; all
other inputs are fed from the CPU, and logits and watched outputs come back to it.

A graph for a first prompt gives caches but takes none: it can be called once, or it begins for
another decoder (``first``) that goes on with its caches. A graph that takes a fixed number of
tokens is called as often as needed, and one that takes a fixed number of sequences gets each as
often as needed.

``attention_mask`` is ``[B, total]`` and ``position_ids`` count the tokens that the mask keeps, so
that left-padded batches work in models that take both; models that count tokens by themselves
(onnxruntime-genai's) accept no padding. See ``tq_onnx.runtime.feeding`` for all inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.plan import CachePair
from tq_onnx.runtime import arguments
from tq_onnx.runtime.contents import Contents, State
from tq_onnx.runtime.errors import run_error
from tq_onnx.runtime.feeding import Feeding, Tokens
from tq_onnx.runtime.graphs import Graph, check_logits, check_pair, copies_of
from tq_onnx.runtime.prompts import ids_of, prompt_of
from tq_onnx.runtime.providers import provider_of
from tq_onnx.runtime.session import placement
from tq_onnx.runtime.signature import Signature

Logits = npt.NDArray[np.floating[Any]]


def _graph_of(
    session: onnxruntime.InferenceSession,
    signature: Signature,
    embeddings: npt.NDArray[Any] | None,
) -> Graph:
    feeding = Feeding(session, signature.interface, signature.caches, embeddings)
    return Graph(session, signature, feeding)


def _state(pair: CachePair) -> str:
    """Return the name of a state in both graphs of a pair by transformers' exporter."""
    return pair.present.removeprefix("output.")


def _pieces(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """Return beginnings and ends of calls of one size."""
    return [(begin, min(begin + size, end)) for begin in range(start, end, size)]


class Decoder(Contents):
    """Runs one batch through a decoder and keeps its caches.

    Args:
        capacity: tokens that the caches hold, updated in place; None for growing caches, or for
            the room that the graph gives them.
        alias: whether one buffer may be past and present; None decides by what the session runs.
        watch: names of further outputs; ``watched`` holds their values after every call.
        embeddings: floats ``[vocabulary, hidden]``, for a graph that takes no ids.
        first: a graph for first prompts and its signature, whose caches this one continues.
        one_by_one: whether this one gets a token a call, as graphs beside ``first`` were traced.
        positions: tokens that the tables of positions have rows for; None if none is known.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        signature: Signature,
        *,
        batch: int = 1,
        capacity: int | None = None,
        alias: bool | None = None,
        watch: Sequence[str] = (),
        where: str = "the model",
        embeddings: npt.NDArray[Any] | None = None,
        first: tuple[onnxruntime.InferenceSession, Signature] | None = None,
        one_by_one: bool = False,
        positions: int | None = None,
    ) -> None:
        """Allocate empty caches; see the class for arguments and errors."""
        batch = arguments.count(batch, "batch", least=1)
        self.session = session
        self.ep = provider_of(session)
        self.watch = tuple(watch)
        self.watched: dict[str, npt.NDArray[Any]] = {}
        self._graph = _graph_of(session, signature, embeddings)
        feeding = self._graph.feeding
        self._one_by_one = one_by_one
        self._positions = positions
        shape = next(e.shape for e in session.get_outputs() if e.name == signature.interface.logits)
        packed = signature.is_paged
        self.last_only = len(shape) == 2 if packed else shape[1] == 1 and feeding.new != 1
        """True if a call gives the logits of its last token only."""
        static = signature.interface.static
        # An original that scatters new rows into its caches gives them out as new ones.
        capacity = signature.capacity(capacity)
        in_place = capacity is not None and (signature.plan is not None or not static)
        in_place |= packed or signature.has_spare_rows
        in_place &= not signature.first_only
        if self.ep.has_own_memory and (not in_place or first is not None):
            raise UsageError(
                f"caches on {self.ep.provider} are updated in place and have a fixed capacity",
                where=where,
                fix="give a capacity, and one converted model for prompts and decoding",
            )
        if alias is None:
            # An original's attention is one kernel that knows the shared buffer, too.
            alias = signature.plan is None or (in_place and placement(session).uses_library)
        super().__init__(
            signature,
            batch=batch,
            copies=copies_of(feeding.batch, batch, where),
            capacity=capacity,
            device=self.ep.device,
            in_place=in_place,
            alias=alias,
            first_states=feeding.first_states,
            where=where,
        )
        self._first = None if first is None else self._begin(*first, embeddings)

    @property
    def longest_call(self) -> int | None:
        """Tokens that the graph takes in a call; None for any number."""
        return self._graph.feeding.new

    def calls(self, tokens: int, most: int | None = None) -> list[slice]:
        """Split a text into calls as long as the graph takes.

        Args:
            most: the most tokens of a call, where the graph leaves the choice; None for all.
        """
        size = self.longest_call
        if size is None:
            size = self._piece(tokens if self.signature.first_only or most is None else most)
        return [slice(*piece) for piece in _pieces(0, tokens, size)]

    @property
    def rows(self) -> int | None:
        """Sequences that the graph takes in a call; None for any number."""
        return self._graph.feeding.batch

    @property
    def takes_padding(self) -> bool:
        """True if sequences may be padded on the left."""
        return self._graph.feeding.takes_padding

    @property
    def in_place(self) -> bool:
        """True if a call writes its new rows into the buffers that it reads."""
        return self._in_place and self._alias

    def prefill(
        self,
        tokens: npt.ArrayLike,
        attention_mask: npt.ArrayLike | None = None,
        *,
        chunk: int | None = None,
    ) -> Logits:
        """Feed a prompt.

        Args:
            tokens: ids ``[B, T]``.
            attention_mask: ``[B, T]``, 0 for padding on the left; None if there is none.
            chunk: tokens per call; None for all at once.

        Returns:
            Logits ``[B, T, vocabulary]`` in the model's own float type; if ``last_only``, one row
            for each call.
        """
        parts = list(self._fed(*self._prompt(tokens, attention_mask), chunk))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def read(
        self, tokens: npt.ArrayLike, attention_mask: npt.ArrayLike | None = None, *, most: int
    ) -> Logits:
        """Feed a prompt, and keep only the logits of its last token.

        Args:
            most: the most tokens of a call, unless the graph reads first prompts in one call.

        Returns:
            Logits ``[B, vocabulary]``.
        """
        at_once = self._first is not None or self.signature.first_only
        for logits in self._fed(*self._prompt(tokens, attention_mask), None if at_once else most):
            last = np.array(logits[:, -1])
            del logits  # those of a piece take gigabytes; the next call makes its own
        return last

    def step(self, tokens: npt.ArrayLike) -> Logits:
        """Feed one token per sequence, ids ``[B]``, and return logits ``[B, vocabulary]``."""
        tokens_B1 = ids_of(tokens).reshape(-1, 1)
        if len(tokens_B1) != self.batch:
            raise UsageError(f"{len(tokens_B1)} tokens are no step of {self.batch} sequences")
        return self._run(tokens_B1, np.ones_like(tokens_B1))[:, -1]

    def copy(self) -> Decoder:
        """Return a decoder of the same kind whose caches hold the same."""
        copied = copy.copy(self)
        copied.restore(self.snapshot())
        return copied

    def _prompt(
        self, tokens: npt.ArrayLike, attention_mask: npt.ArrayLike | None
    ) -> tuple[Tokens, Tokens]:
        """Return ids and mask ``[B, T]`` of a prompt, or refuse it."""
        return prompt_of(tokens, attention_mask, batch=self.batch, padding=self.takes_padding)

    def _fed(self, tokens_BT: Tokens, mask_BT: Tokens, chunk: int | None) -> Iterator[Logits]:
        """Feed a prompt; yield the logits of each call."""
        for start, stop in self._calls(tokens_BT.shape[1], chunk):
            yield self._run(tokens_BT[:, start:stop], mask_BT[:, start:stop])

    def _begin(
        self,
        session: onnxruntime.InferenceSession,
        signature: Signature,
        embeddings: npt.NDArray[Any] | None,
    ) -> Graph:
        """Return the graph for first prompts."""
        fits = len(signature.caches) == len(self.signature.caches) and signature.first_only
        fits &= {_state(pair) for pair in signature.interface.states} == {*self._pasts}
        if self.capacity != self.signature.slots or not fits:
            raise UsageError(
                "a graph for first prompts needs one that continues its caches and states"
            )
        check_pair(signature.plan, self.signature.plan)
        return _graph_of(session, signature, embeddings)

    def _next(self) -> Graph:
        """Return the graph that the next call is for."""
        return self._first if self._first is not None and self.length == 0 else self._graph

    def _calls(self, new: int, chunk: int | None) -> list[tuple[int, int]]:
        """Return beginnings and ends of the parts that a prompt is fed in."""
        size = 1 if self._one_by_one else self._graph.feeding.new or self._piece(chunk or new)
        if self._first is None or self.length:
            return _pieces(0, new, size)
        begin = min(self._first.feeding.new or self._piece(chunk or new), new)
        return [(0, begin), *_pieces(begin, new, size)]

    def _piece(self, most: int) -> int:
        """Return the tokens of a call that has so many at most; a first prompt is one call."""
        limit = None if self.signature.first_only else self.signature.interface.call_tokens
        return min(most, limit or most)

    @property
    def _pasts(self) -> dict[str, str | None]:
        """The input that continues each state, by its name."""
        return {_state(pair): pair.past for pair in self.signature.interface.states}

    def _run(self, tokens_BT: Tokens, mask_BT: Tokens) -> Logits:
        mask_BS = np.concatenate([self._state.mask, mask_BT], axis=1)
        graph = self._next()
        self._check_call(graph, tokens_BT.shape[1])
        # Only what might be too long is counted: this is done at every step.
        most = mask_BS.shape[1] if self._positions is None else self._positions
        if mask_BS.shape[1] > most and mask_BS.sum(axis=1).max() > most:
            raise UsageError(
                f"the model has {most:,} positions, and the text is longer",
                where=self.where,
                fix="give fewer tokens",
            )
        if graph.signature.is_enlarged and self.capacity is None:
            self._caches.make_room(mask_BS.shape[1])
        # ONNX Runtime reads the arrays where they are: they have to live as long as the results.
        slots = max(self.slots, mask_BS.shape[1])
        if not graph.signature.interface.static:
            slots = mask_BS.shape[1]
        feeds = {
            name: self._repeated(values)
            for name, values in graph.feeding.values(tokens_BT, mask_BS, slots).items()
        }
        watch = self.watch if graph is self._graph else ()
        in_place = self._in_place and graph is not self._first
        states = graph.signature.interface.states
        recurrent = self._state.recurrent
        feeds |= {pair.past: recurrent[pair.past] for pair in states if pair.past is not None}
        binding = graph.session.io_binding()
        for name, values in feeds.items():
            binding.bind_cpu_input(name, values)
        outputs = (graph.signature.interface.logits, *watch, *(pair.present for pair in states))
        for name in outputs:
            binding.bind_output(name, "cpu")
        total = mask_BS.shape[1]
        grows = self._grows and not in_place
        caches = self._caches
        caches.bind(binding, graph.signature, in_place=in_place, grows=grows, tokens=total)
        try:
            graph.session.run_with_iobinding(binding)
        except Exception as error:
            if not grows:
                raise run_error(error, self.where, self.ep) from error
            # Nothing has changed yet. A graph that shortens its caches gives out fewer rows than
            # there was room made for; which ones do is not told by their interface.
            self._grows = False
            return self._run(tokens_BT, mask_BT)
        first, *results = binding.get_outputs()
        logits = np.asarray(first.numpy())
        if graph.signature.is_paged:
            logits = logits.reshape(self.batch, -1, logits.shape[-1])
        check_logits(logits.shape, self.batch * self._copies, tokens_BT.shape[1], self.where)
        recurrent = {
            past: np.array(value.numpy())
            for pair, value in zip(states, results[len(watch) :], strict=False)
            if (past := self._pasts[_state(pair)]) is not None
        }
        self.watched = {
            name: self._own(np.array(value.numpy()))
            for name, value in zip(watch, results[: len(watch)], strict=True)
        }
        caches = caches.advanced(results[len(outputs) - 1 :], in_place=in_place, grows=grows)
        self._state = State(caches, mask_BS, recurrent)
        return self._own(logits)

    def _check_call(self, graph: Graph, new: int) -> None:
        total = self.length + new
        if graph.signature.first_only and self.length:
            raise UnsupportedModelError(
                "the graph takes a first prompt only",
                where=self.where,
                fix="continue with the graph that was exported for decoding",
            )
        if graph.feeding.new not in (None, new):
            raise UsageError(
                f"{new} tokens were given to a graph that takes {graph.feeding.new} in a call",
                where=self.where,
            )
        most = graph.signature.interface.call_tokens
        if most is not None and new > most:
            raise UsageError(
                f"{new} tokens were given, and the graph computes more than {most} in a call wrong",
                where=self.where,
                fix=f"give at most {most}, or use the graph that was exported for decoding",
            )
        if self.capacity is not None and total > self.capacity:
            raise UsageError(
                f"{total} tokens do not fit into caches with a capacity of {self.capacity}",
                fix="raise the capacity or feed fewer tokens",
            )
