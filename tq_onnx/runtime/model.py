"""A model with an open session: its inputs, and the decoders that run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.plan import ENCODER, Interface, Plan
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.providers import provider_of
from tq_onnx.runtime.session import ports, vocabulary_size
from tq_onnx.runtime.signature import Signature

if TYPE_CHECKING:
    from tq_onnx.recognise.match import Recognition

_MADE_UP_ROWS: Final = 1024
_MADE_UP_SIZE: Final = 0.02


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model with an open session."""

    path: Path  #: the model file
    session: Any  #: the onnxruntime session
    signature: Signature  #: names, caches and, for a converted model, the plan
    #: what was found in an original; None for a converted model
    recognition: Recognition | None = None
    #: the graph of first prompts, whose caches this one goes on with; None if it takes them itself
    first: OpenModel | None = None
    data: tuple[Path, ...] = ()  #: the files of its external data
    #: tokens that its tables of positions have rows for; None if none is known
    positions: int | None = None

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
        if not signature.first_only:
            return signature.slots
        inputs, _ = ports(self.session)
        (tokens,) = (port for port in inputs if port.name == signature.interface.tokens)
        size = tokens.shape[1]
        return size if isinstance(size, int) else signature.interface.call_tokens or signature.slots

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text, by the graph's caches and its tables of positions."""
        return min((size for size in (self.room, self.positions) if size is not None), default=None)

    def refuse_encoder(self) -> None:
        """Refuse models whose logits depend on more than tokens, which decoders here make up."""
        models = (self,) if self.first is None else (self.first, self)
        fed = (entry for model in models for entry in model.signature.interface.fed)
        encoded = next((entry.name for entry in fed if entry.role == ENCODER), None)
        if encoded is not None:
            raise UnsupportedModelError(
                f"the model goes on from what an encoder makes ({encoded}), not from a text alone",
                where=str(self.path),
                fix="run it with what runs its encoder; verify, report and bench make that up",
            )

    def refuse_text(self) -> None:
        """Refuse models that do not go from token ids to logits."""
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
        """Refuse ids that the model does not know."""
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise UsageError(
                f"token ids reach from {tokens.min()} to {tokens.max()}, but the model knows "
                f"{self.vocabulary}",
                fix="give the tokenizer that belongs to the model",
            )

    def refuse_prompt(self, tokens: Sequence[int]) -> None:
        """Refuse a prompt with ids that the model does not know."""
        known = self.vocabulary
        strange = next((token for token in tokens if not 0 <= token < known), None)
        if strange is not None:
            raise UsageError(
                f"the tokenizer gives token {strange}, but the model knows {known}",
                where=str(self.path),
                fix="name the folder of its own tokenizer with `tokenizer`",
            )

    def capacity_for(
        self, prompt_tokens: int, new_tokens: int, *, requested: int | None = None
    ) -> int | None:
        """Return the tokens that caches have to hold to continue a prompt.

        Returns:
            The capacity; None for caches that grow.
        """
        needed = prompt_tokens + new_tokens
        capacity = requested or self.room
        if capacity is None:
            fixed = self.signature.fixed_capacity and self.first is None
            return needed if fixed else None
        if capacity < needed - 1:  # the last token is not cached
            raise UsageError(
                f"{prompt_tokens} prompt tokens and {new_tokens} new ones need a capacity of "
                f"{needed - 1}, not {capacity}",
                fix="give fewer `max_new_tokens`"
                if self.room
                else "give a larger `context` or fewer `max_new_tokens`",
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
