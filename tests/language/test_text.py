"""Stop strings, wherever they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tq_onnx.language.text import StopStrings

_LETTERS = st.text("ab", max_size=12)


@given(st.lists(_LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_in_parts_ends_where_the_whole_does(parts: list[str], stops: list[str]) -> None:
    cut, given_out = StopStrings(stops), ""
    whole = ""
    for part in parts:
        if cut.found:
            break
        whole += part
        given_out += cut.take(part)
        ends = [whole.find(stop) for stop in stops if stop in whole]
        assert cut.found == bool(ends)
        assert whole[: min(ends)] == given_out if ends else whole.startswith(given_out)
    if not cut.found:
        assert given_out + cut.rest() == whole
    assert cut.take("more") == "" if cut.found else True
