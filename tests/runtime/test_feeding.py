"""Every input that a decoder can be given, by role, type and shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import (
    CACHE_POSITIONS,
    IGNORED,
    LOGITS_TO_KEEP,
    NEW_LENGTHS,
    PAST_LENGTH,
    TOTAL_LENGTH,
    VISIBLE,
    CachePair,
    ExtraInput,
    Interface,
)
from tq_onnx.runtime.feeding import Feeding
from tq_onnx.runtime.jobs import Choice, Job
from tq_onnx.runtime.prefixes import Prefixes, page_hashes

TOKENS = np.array([[5, 6], [7, 8]])
MASK = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
PLAIN = Interface("ids", "mask", "positions", "logits")


@dataclass
class Entry:
    name: str
    type: str
    shape: list[Any]


@dataclass
class Session:
    entries: list[Entry]
    returned: tuple[Entry, ...] = ()

    def get_inputs(self) -> list[Entry]:
        return self.entries

    def get_outputs(self) -> tuple[Entry, ...]:
        return self.returned


INTEGER = "tensor(int64)"
ENTRIES = [
    Entry("ids", INTEGER, ["B", "T"]),
    Entry("mask", INTEGER, ["B", "S"]),
    Entry("positions", INTEGER, ["B", "T"]),
]


def feeding(entries: list[Entry], interface: Interface, **options: Any) -> Feeding:
    return Feeding(Session(entries), interface, (), **options)  # type: ignore[arg-type]


def one(role: str, type_name: str, shape: list[Any], slots: int = 5) -> np.ndarray:
    """What a further input is given in a call of two tokens after three."""
    entries = [*ENTRIES, Entry("more", type_name, shape)]
    made = feeding(entries, replace(PLAIN, fed=(ExtraInput("more", role),)))
    return made.values(TOKENS, MASK, slots)["more"]


def test_masks_and_positions() -> None:
    values = feeding(ENTRIES, PLAIN).values(TOKENS, MASK, 5)

    np.testing.assert_array_equal(values["ids"], TOKENS)
    np.testing.assert_array_equal(values["mask"], MASK)
    np.testing.assert_array_equal(values["positions"], [[1, 2], [3, 4]])


def test_types_and_fixed_lengths_are_the_graphs() -> None:
    entries = [
        Entry("ids", "tensor(int32)", ["B", "T"]),
        Entry("mask", "tensor(bool)", ["B", 8]),
        ENTRIES[2],
    ]
    values = feeding(entries, PLAIN).values(TOKENS, MASK, 8)

    assert values["ids"].dtype == np.int32
    assert values["mask"].dtype == np.bool_
    np.testing.assert_array_equal(values["mask"], np.pad(MASK, ((0, 0), (0, 3))).astype(bool))


@pytest.mark.parametrize(
    ("role", "shape", "expected"),
    [
        (PAST_LENGTH, [], 3),
        (PAST_LENGTH, [1], [3]),
        (PAST_LENGTH, ["B"], [3, 3]),
        (TOTAL_LENGTH, ["B"], [5, 5]),
        (NEW_LENGTHS, ["B"], [2, 2]),
        (CACHE_POSITIONS, ["T"], [3, 4]),
        (LOGITS_TO_KEEP, [], 2),
        (LOGITS_TO_KEEP, ["n"], [2]),
        (IGNORED, [2, "x"], [[0], [0]]),
    ],
)
def test_numbers_of_tokens(role: str, shape: list[Any], expected: Any) -> None:
    found = one(role, INTEGER, shape)

    assert found.dtype == np.int64
    assert found.shape == np.shape(expected)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("width", ["S", 7])
def test_visible_keys(width: Any) -> None:
    seen = one(VISIBLE, "tensor(bool)", ["B", 1, "T", width], slots=7)

    expected = [
        [[0, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0]],
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]],
    ]
    assert seen.dtype == np.bool_
    np.testing.assert_array_equal(seen[:, 0], np.array(expected, bool))


@pytest.mark.parametrize("type_name", ["float", "float16"])
def test_visible_keys_as_a_bias(type_name: str) -> None:
    dtype = np.dtype("float32" if type_name == "float" else type_name)
    bias = one(VISIBLE, f"tensor({type_name})", ["B", 1, "T", "S"])

    assert bias.dtype == dtype
    assert set(np.unique(bias)) == {0, np.finfo(dtype).min}
    np.testing.assert_array_equal(bias[0, 0, 1] == 0, MASK[0].astype(bool))


def test_embeddings_are_looked_up() -> None:
    table = np.arange(20, dtype=np.float64).reshape(10, 2)
    entries = [Entry("ids", "tensor(float)", ["B", "T", 2]), *ENTRIES[1:]]
    found = feeding(entries, PLAIN, embeddings=table).values(TOKENS, MASK, 5)["ids"]

    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, table[TOKENS])


@pytest.mark.parametrize(
    ("interface", "padding"),
    [
        (PLAIN, True),
        (replace(PLAIN, padding=False), False),
        (replace(PLAIN, position_ids=None), False),
        (replace(PLAIN, attention_mask=None), False),
    ],
)
def test_padding_needs_mask_and_positions(interface: Interface, padding: bool) -> None:
    known = (interface.tokens, interface.attention_mask, interface.position_ids)
    entries = [entry for entry in ENTRIES if entry.name in known]

    assert feeding(entries, interface).takes_padding == padding


@pytest.mark.parametrize(
    ("entry", "fed", "message"),
    [
        (Entry("more", INTEGER, []), (), "does not have: more"),
        (
            Entry("more", "tensor(float)", []),
            (ExtraInput("more", PAST_LENGTH),),
            "type tensor.float.",
        ),
        (Entry("more", INTEGER, ["B", "T"]), (ExtraInput("more", VISIBLE),), "not bool or float"),
        (
            Entry("more", "tensor(bool)", ["B", "T"]),
            (ExtraInput("more", VISIBLE),),
            "rank 2, not 4",
        ),
    ],
)
def test_what_cannot_be_filled_is_named(
    entry: Entry, fed: tuple[ExtraInput, ...], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        feeding([*ENTRIES, entry], replace(PLAIN, fed=fed))
    assert "more" in str(caught.value)


def test_states_begin_as_zeros_of_the_size_that_comes_back() -> None:
    """The size of the input is a name in what transformers' exporter writes."""
    past = Entry("input.state", "tensor(float16)", ["B", "4", "3"])
    present = Entry("output.state", "tensor(float16)", ["B", 4, 3])
    interface = replace(PLAIN, states=(CachePair(past.name, present.name),))
    made = Feeding(Session([*ENTRIES, past], (present,)), interface, ())  # type: ignore[arg-type]

    (state,) = made.first_states(2).values()

    assert (state.shape, state.dtype, state.any()) == ((2, 4, 3), np.float16, False)


# Which requests wait for a beginning that another one reads.


PAGE = 4


def job(*pages: int, rest: int = 1) -> Job:
    """A request whose pages are full of one token each."""
    tokens = [page for page in pages for _ in range(PAGE)] + [0] * rest
    return Job(None, tokens, 1, Choice(), print, page_hashes=page_hashes(tokens, PAGE))


def test_hashes_are_of_everything_up_to_the_end_of_a_full_page() -> None:
    assert page_hashes([1, 2, 3], PAGE) == ()
    assert page_hashes([1] * 100, 0) == ()
    first, second = page_hashes([1] * 9, PAGE)
    assert page_hashes([1] * 4, PAGE) == (first,)
    assert page_hashes([2, 1, 1, 1, 1, 1, 1, 1], PAGE)[1] != second


def test_a_request_waits_until_its_beginning_is_read() -> None:
    prefixes = Prefixes(100)
    first, second = job(1, 2, 3), job(1, 2, 4)
    assert not prefixes.holds(first)
    prefixes.begin(first)
    assert prefixes.holds(second)
    assert not prefixes.holds(job(5, 1, 2))
    assert not prefixes.holds(job(rest=3))
    prefixes.end(first, is_read=True)
    assert not prefixes.holds(second)
    prefixes.begin(second)
    # Of what the second reads, only its own page is new.
    assert not prefixes.holds(job(1, 2, 5))
    assert prefixes.holds(job(1, 2, 4, 5))


def test_what_ends_unread_lets_go_and_is_not_known() -> None:
    prefixes = Prefixes(100)
    first, second, third = (job(1, 2, end) for end in (3, 4, 5))
    prefixes.begin(first)
    prefixes.end(first, is_read=False)
    assert not prefixes.holds(second)
    prefixes.begin(second)
    assert prefixes.holds(third)


def test_nobody_waits_for_a_long_prompt_to_save_little_of_it() -> None:
    prefixes = Prefixes(100)
    prefixes.begin(job(1, *range(20, 30)))
    assert not prefixes.holds(job(1, 2, 3))
    assert prefixes.holds(job(1, *range(20, 25)))


def test_pages_that_the_engine_has_dropped_are_forgotten() -> None:
    prefixes = Prefixes(3)
    for first in (job(1, 2), job(3, 4)):
        prefixes.begin(first)
        prefixes.end(first, is_read=True)
    prefixes.begin(job(1, 2))
    assert prefixes.holds(job(1, 2, 5))
    prefixes.begin(job(3, 4, 6))
    assert not prefixes.holds(job(3, 4, 5))
