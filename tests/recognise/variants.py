"""Random forms of one decoder layer, as text for ``synthetic.decoder``.

All of them compute attention that the operators can compute, so a recogniser should find them all;
what it does not find it must refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.decoders.synthetic import ADDITIVE, CACHE, HIDING, PLAIN, REPEAT, SELECTING, UNMASKED

SCALE = 0.25
"""D^-0.5: what all factors multiply to."""
CAP = 0.7

BY_RESHAPE = """kf = Reshape(present_key, split)
        ke = Expand(kf, expansion)
        kr = Reshape(ke, repeated)
        vf = Reshape(present_value, split)
        ve = Expand(vf, expansion)
        vr = Reshape(ve, repeated)"""
BY_TILE = REPEAT.replace("Expand", "Tile")
TOKENS_FIRST = """kb = Transpose<perm = [0, 2, 1, 3]>(present_key)
        ku = Unsqueeze(kb, three)
        ke = Expand(ku, wide_expansion)
        kw = Reshape(ke, wide_repeated)
        kr = Transpose<perm = [0, 2, 1, 3]>(kw)
        vb = Transpose<perm = [0, 2, 1, 3]>(present_value)
        vu = Unsqueeze(vb, three)
        ve = Expand(vu, wide_expansion)
        vw = Reshape(ve, wide_repeated)
        vr = Transpose<perm = [0, 2, 1, 3]>(vw)"""

TURNED = "kt = Transpose<perm = [0, 1, 3, 2]>(KR)"
TURNED_FLAT = """kl = Shape<start = 2, end = 3>(KR)
        kg = Concat<axis = 0>(rest, kl, sixteen)
        k3 = Reshape(KR, kg)
        k4 = Transpose<perm = [0, 2, 1]>(k3)
        kh = Concat<axis = 0>(rest, all_heads, sixteen, kl)
        kt = Reshape(k4, kh)"""
PRODUCTS = {
    "matmul": (TURNED, "s0 = MatMul(qs, KT)"),
    "matmul of three dimensions": (TURNED_FLAT, "s0 = MatMul(qs, KT)"),
    "fused": ("kt = Identity(KR)", "s0 = com.microsoft.FusedMatMul<transB = 1>(qs, KT)"),
    "einsum": ("kt = Identity(KR)", 's0 = Einsum<equation = "bhtd,bhsd->bhts">(qs, KT)'),
    "einsum of turned": (TURNED, 's0 = Einsum<equation = "bhds,bhtd->bhts">(KT, qs)'),
}
WEIGHTED = {
    "matmul": "o = MatMul(p, vr)",
    "fused": "o = com.microsoft.FusedMatMul(p, vr)",
    "einsum": 'o = Einsum<equation = "bhts,bhsd->bhtd">(p, vr)',
    "einsum of values": 'o = Einsum<equation = "bhsd,bhts->bhtd">(vr, p)',
}
MASKS = {
    "additive": ADDITIVE,
    "selecting": SELECTING,
    "hiding": HIDING,
    "none": UNMASKED,
    "additive from the left": "s2 = Add(bias, s1)",
    "two": "sm = Add(s1, bias)\n        s2 = Where(keep, sm, lowest)",
    "of another precision": """bh = Cast<to = 11>(bias)
        sd = Cast<to = 11>(s1)
        sm = Add(sd, bh)
        s2 = Cast<to = 1>(sm)""",
    "of scores that are scaled behind it": """cx = Constant<value_float = 8.0>()
        sx = Mul(s1, cx)
        sm = Add(sx, bias)
        s2 = Div(sm, cx)""",
    "chosen from scores that are scaled behind it": """cx = Constant<value_float = 8.0>()
        sx = Mul(s1, cx)
        sm = Where(keep, sx, lowest)
        s2 = Div(sm, cx)""",
    "of scores less the largest": """sm = Add(s1, bias)
        mx = ReduceMax<keepdims = 1>(sm, rest)
        s2 = Sub(sm, mx)""",
    "cut to the keys": """sl = Shape<start = 2, end = 3>(present_key)
        bc = Slice(bias, nought, sl, three)
        s2 = Add(s1, bc)""",
}
PROBABILITIES = {
    "plain": "p = Identity(p0)",
    "guarded": "pn = IsNaN(p0)\n        p = Where(pn, nothing, p0)",
    "dropout": "p = Dropout(p0)",
    "of another precision": "pd = Cast<to = 11>(p0)\n        p = Cast<to = 1>(pd)",
}
CACHES = {
    "concat": CACHE,
    "joined alone": CACHE.replace("present_key", "jk").replace("present_value", "jv")
    + "\n        present_key = Concat<axis = 0>(jk)\n        present_value = Identity(jv)",
    "past joined alone": "pk = Concat<axis = 1>(past_key)"
    "\n        pv = Identity(past_value)\n        "
    + CACHE.replace("past_key", "pk").replace("past_value", "pv"),
}
REPEATS = {
    "unsqueeze": REPEAT,
    "reshape": BY_RESHAPE,
    "tile": BY_TILE,
    "tokens first": TOKENS_FIRST,
    "none": PLAIN,
}


@dataclass(frozen=True)
class Variant:
    """Arguments for ``decoder``, and what must be found.

    Attributes:
        arguments: the arguments.
        masked: whether there is a mask.
        softcap: 0 for none.
    """

    arguments: dict[str, Any]
    masked: bool
    softcap: float


def _scaled(name: str, source: str, factor: float, how: int) -> str:
    """Multiplies a value by a constant that is written in one of several ways."""
    constant = f"c{name} = Constant<value_float = {factor!r}>()"
    if how == 0:
        return f"{constant}\n        {name} = Mul({source}, c{name})"
    if how == 1:
        return f"{constant}\n        {name} = Mul(c{name}, {source})"
    if how == 2:
        return (
            f"c{name} = Constant<value_float = {1 / factor!r}>()"
            f"\n        {name} = Div({source}, c{name})"
        )
    if how == 3:
        return (
            f"d{name} = Constant<value_float = {factor**2!r}>()\n        e{name} = Sqrt(d{name})"
            f"\n        {name} = Mul({source}, e{name})"
        )
    # The head size, 16, is asked of the query.
    chosen = (
        "Slice(z{0}, three, window_end)",
        "Gather(z{0}, three)",
        "Shape<start = 3, end = 4>(q)",
    )
    return (
        f"z{name} = Shape(q)\n        y{name} = {chosen[how - 4].format(name)}"
        f"\n        w{name} = Cast<to = 1>(y{name})"
        f"\n        u{name} = Constant<value_float = {factor / 16!r}>()"
        f"\n        v{name} = Mul(w{name}, u{name})\n        {name} = Mul({source}, v{name})"
    )


def _passed(name: str, source: str, how: int) -> str:
    """Passes a value on through nodes that change nothing."""
    return (
        f"{name} = Identity({source})",
        f"{name} = Cast<to = 1>({source})",
        f"{name} = Concat<axis = 1>({source})",
        f"h{name} = Cast<to = 11>({source})\n        {name} = Cast<to = 1>(h{name})",
    )[how]


@st.composite
def variants(draw: st.DrawFn) -> Variant:
    """Draws a form of a layer."""

    def either(forms: dict[str, Any]) -> Any:
        return forms[draw(st.sampled_from(sorted(forms)))]

    on_query, on_keys, on_turned, on_scores = draw(
        st.sampled_from(
            [
                (SCALE, 1.0, 1.0, 1.0),
                (0.5, 0.5, 1.0, 1.0),
                (0.5, 1.0, 0.5, 1.0),
                (1.0, 1.0, 1.0, SCALE),
                (0.5, 1.0, 1.0, 0.5),
                (0.5, 0.5, 2.0, 0.5),
                (1.0, SCALE, 1.0, 1.0),
            ]
        )
    )

    def step(name: str, source: str, factor: float) -> str:
        if factor == 1:
            return _passed(name, source, draw(st.integers(0, 3)))
        return _scaled(name, source, factor, draw(st.integers(0, 6)))

    repeat = either(REPEATS)
    keys, product = either(PRODUCTS)
    query = "\n        ".join(
        [_passed("qa", "q", draw(st.integers(0, 3))), step("qs", "qa", on_query)]
    )
    keys = "\n        ".join(
        [step("ks", "kr", on_keys), keys.replace("KR", "ks"), step("kx", "kt", on_turned)]
    )
    scores, softcap = step("s1", "s0", on_scores), 0.0
    if draw(st.booleans()):
        softcap = CAP
        scores = "\n        ".join(
            [
                step("sa", "s0", on_scores),
                "sb = Div(sa, cap)\n        sc = Tanh(sb)\n        s1 = Mul(sc, cap)",
            ]
        )
    mask = either(MASKS)
    arguments = {
        "heads": 2 if repeat == PLAIN else draw(st.sampled_from([4, 6])),
        "cache": either(CACHES),
        "repeat": repeat,
        "keys": keys,
        "query": query,
        "product": product.replace("KT", "kx"),
        "scores": scores,
        "mask": mask,
        "probabilities": either(PROBABILITIES),
        "weighted": either(WEIGHTED),
        "infer": draw(st.booleans()),
    }
    return Variant(arguments, mask != UNMASKED, softcap)
