"""The order in which the bodies of a model know its codecs: attributes of nodes count in it."""

from __future__ import annotations

from collections.abc import Sequence

from tq_onnx.codec.spec import Codec

Pairs = Sequence[tuple[Codec, Codec]]

Encoder = tuple[Codec, bool]
"""A codec, and whether errors are fed back."""


def body_codecs(pairs: Pairs) -> tuple[Codec, ...]:
    """Return the codecs of a model in the order that ``codec_index`` counts in.

    Args:
        pairs: codecs of keys and values, of one layer after the other.
    """
    return tuple(dict.fromkeys(codec for pair in pairs for codec in pair))


def body_encoders(pairs: Pairs, has_feedback: bool) -> tuple[Encoder, ...]:
    """Return the encoders of a model in the order that ``codec_index`` of the encoder counts in.

    Args:
        pairs: codecs of keys and values, of one layer after the other.
        has_feedback: whether keys are coded with error feedback where their codec can.
    """
    fed = [((key, has_feedback and key.searches), (value, False)) for key, value in pairs]
    return tuple(dict.fromkeys(encoder for pair in fed for encoder in pair))
