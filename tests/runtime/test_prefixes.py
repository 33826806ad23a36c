"""Which requests wait for a beginning that another one reads."""

from __future__ import annotations

from tq_onnx.runtime.jobs import Choice, Job
from tq_onnx.runtime.prefixes import Prefixes, page_hashes

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
