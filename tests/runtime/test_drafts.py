"""Guesses of tokens from what followed the same tokens before."""

from __future__ import annotations

from tq_onnx.runtime.drafts import Drafts

MOST = 7


def passes(prompt: list[int], text: list[int]) -> tuple[int, int]:
    """Passes of an engine that writes a text, and guesses of it that were wrong."""
    drafts, place, count, wrong = Drafts(prompt), 0, 0, 0
    guess: list[int] = []
    while place < len(text):
        right = 0
        while right < len(guess) and text[place + right : place + right + 1] == [guess[right]]:
            right += 1
        wrong += len(guess) - right
        found = text[place : place + right + 1]
        drafts.take(found)
        place += len(found)
        count += 1
        guess = drafts.propose(MOST)
    return count, wrong


def test_nothing_is_guessed_of_new_tokens() -> None:
    assert Drafts([]).propose(MOST) == []
    assert Drafts(range(50)).propose(MOST) == []
    assert passes(list(range(50)), list(range(50, 90))) == (40, 0)


def test_more_is_guessed_the_longer_a_part_is_followed() -> None:
    prompt = [*range(100), *range(3)]
    drafts = Drafts(prompt)
    assert drafts.propose(MOST) == [3, 4]
    assert drafts.propose(1) == [3]
    assert drafts.propose(0) == []
    drafts.take([3, 4, 5])
    assert drafts.propose(MOST) == [6, 7, 8, 9]
    count, wrong = passes(prompt, list(range(3, 100)))
    assert (count, wrong) == (14, 1)  # the end is not foreseen


def test_a_part_that_ends_at_the_end_goes_on_as_it_began() -> None:
    drafts = Drafts([1, 2] * 8)
    assert drafts.propose(MOST) == [1, 2, 1, 2, 1, 2, 1]


def test_a_text_whose_guesses_fail_is_left_alone() -> None:
    """Three tokens are often the same here, and what follows never is."""
    text = [token for number in range(200) for token in (1, 2, 3, 10 + number)]
    count, wrong = passes([], text)
    assert count == len(text)
    assert wrong <= 2
    # It is guessed again once a part is followed for long enough.
    count, _ = passes(text, text)
    assert count < len(text) // 4
