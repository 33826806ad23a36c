"""Random attention that is spelled out, or is one operator behind the update of its caches."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.decoders.random_graphs import (
    HEADER,
    MASK,
    PAIRS,
    POSITIONS,
    SPLIT,
    TWICE,
    RandomGraph,
    Writer,
)
from tests.decoders.random_masks import make_bias, make_lengths

CACHES = {
    "concat": """present_key = Concat<axis = 2>(past_key, k9)
        present_value = Concat<axis = -2>(past_value, v9)""",
    "turned": """past_kt = Transpose<perm = [0, 2, 1, 3]>(past_key)
        past_vt = Transpose<perm = [0, 2, 1, 3]>(past_value)
        whole_kt = Concat<axis = 1>(past_kt, k8)
        whole_vt = Concat<axis = 1>(past_vt, v8)
        present_key = Transpose<perm = [0, 2, 1, 3]>(whole_kt)
        present_value = Transpose<perm = [0, 2, 1, 3]>(whole_vt)""",
    "new before old": """present_key = Concat<axis = 2>(k9, past_key)
        present_value = Concat<axis = 2>(v9, past_value)""",
    "other rows": """k99 = Tanh(k9)
        present_key = Concat<axis = 2>(past_key, k99)
        present_value = Concat<axis = 2>(past_value, k9)""",
    "static": """count_w = Shape<start = 2, end = 3>(k9)
        count_w0 = Squeeze(count_w)
        steps_w = Range(zero, count_w0, step)
        slots_w = Add(steps_w, start)
        index_w = Unsqueeze(slots_w, minus_one)
        past_kw = Transpose<perm = [2, 0, 1, 3]>(past_key)
        past_vw = Transpose<perm = [2, 0, 1, 3]>(past_value)
        new_kw = Transpose<perm = [2, 0, 1, 3]>(k9)
        new_vw = Transpose<perm = [2, 0, 1, 3]>(v9)
        key_w = ScatterND(past_kw, index_w, new_kw)
        value_w = ScatterND(past_vw, index_w, new_vw)
        present_key = Transpose<perm = [1, 2, 0, 3]>(key_w)
        present_value = Transpose<perm = [1, 2, 0, 3]>(value_w)""",
}
"""Ways of new rows into the caches."""
REPEATS = {
    "expand": """k_u = Unsqueeze(present_key, third)
        v_u = Unsqueeze(present_value, third)
        k_e = Expand(k_u, groups)
        v_e = Expand(v_u, groups)
        k_r = Reshape(k_e, all_heads)
        v_r = Reshape(v_e, all_heads)""",
    "tile": """groups_1 = Constant<value_ints = [1, 2, 1, 1]>()
        k_r = Tile(present_key, groups_1)
        v_r = Tile(present_value, groups_1)""",
    "gather": """owners = Constant<value_ints = [1, 0, 1, 0]>()
        k_r = Gather<axis = 1>(present_key, owners)
        v_r = Gather<axis = 1>(present_value, owners)""",
}
TURNS = {
    "reversed": """far_q = Constant<value_ints = [-100000]>()
        qf = Slice(q9, minus_one, far_q, third, minus_one)""",
    "rolled": """first_q = Slice(q9, zero_1, one, third)
        rest_q = Slice(q9, one, end, third)
        qf = Concat<axis = 2>(rest_q, first_q)""",
}
"""Queries in another order than the new rows."""
PRODUCTS = {
    "matmul": "k_t = Transpose<perm = [0, 1, 3, 2]>(k_r)\ns_0 = MatMul(q_s, k_t)",
    "einsum": 's_0 = Einsum<equation = "bhtd,bhsd->bhts">(q_s, k_r)',
}
READERS = {
    "none": "nobody = Identity(o)",
    "its size": "size_n = Shape<start = 2, end = 3>(present_key)\nsize_f = Cast<to = 1>(size_n)"
    "\nnobody = Mul(o, size_f)",
    "the old size": "size_n = Shape<start = 2, end = 3>(past_value)\nsize_f = Cast<to = 1>(size_n)"
    "\nnobody = Add(o, size_f)",
    "its sum": "sum_n = ReduceSum<keepdims = 0>(present_value)\nnobody = Add(o, sum_n)",
    "the old rows": "sum_n = ReduceSum<keepdims = 0>(past_key)\nnobody = Add(o, sum_n)",
    "the new rows": "sum_n = ReduceMean<keepdims = 1>(k9, third)\nmean_n = ReduceMean<keepdims = 1>"
    "(sum_n, one)\nnobody = Add(o, mean_n)",
    "its last row": "last_n = Slice(present_key, minus_one, end, third)"
    "\nmean_n = ReduceMean<keepdims = 1>(last_n, one)\nnobody = Add(o, mean_n)",
    "the scores": "top_n = ReduceMax<keepdims = 1>(s_2, minus_one)\ntop_c = Max(top_n, nothing)"
    "\nnobody = Add(o, top_c)",
}


@st.composite
def concatenated(draw: st.DrawFn) -> RandomGraph:
    """Draws a decoder whose caches grow by Concat or are written by ScatterND."""
    writer = Writer(draw)
    graph = writer.graph
    graph.heads, graph.kv_heads = draw(st.sampled_from([(2, 2), (2, 2), (4, 2)]))
    writer.write(HEADER)
    rows = _rows(writer)
    query = _queries(writer)
    write = CACHES[writer.pick("cache", *CACHES, usual=12)]
    graph.static = "ScatterND" in write
    if graph.static:
        writer.write(_start(writer))
    writer.write(write)
    make_lengths(writer, rows)
    make_bias(writer)
    _attention(writer, query)
    writer.leave()
    graph.body = "\n".join(writer.lines)
    return graph


def _start(writer: Writer) -> str:
    """Tells the first slot that is written: ``start``."""
    told = writer.pick("start from", "given", "positions", "mask", usual=4)
    if told == "positions":
        writer.positions()
        return f"start = ReduceMin<keepdims = 0>({POSITIONS})"
    if told == "mask":
        writer.mask()
        return f"""long_w = Shape<start = 1, end = 2>({MASK})
            fresh_w = Shape<start = 1, end = 2>(input_ids)
            before_w = Sub(long_w, fresh_w)
            start = Squeeze(before_w)"""
    writer.take("begin", "int64")
    return "start = Identity(begin)"


def _rows(writer: Writer) -> str:
    """Makes the projections, perhaps of more or fewer tokens than there are ids."""
    graph = writer.graph
    what = writer.pick("ids", "plain", "merged", "split", usual=12)
    if what == "plain":
        writer.write(SPLIT.format(q="q0", k="k0", v="v0"))
        return what
    graph.rate = 1 if what == "merged" else 4
    if what == "merged":
        writer.write(PAIRS.format(x="x", y="xm"))
        writer.write("xs = ReduceMean<keepdims = 0>(xm2, pair)")
    else:
        writer.write(TWICE.format(x="x", y="xs"))
    writer.write("qm = MatMul(xs, w_q)\nkm = MatMul(xs, w_k)\nvm = MatMul(xs, w_v)")
    writer.write(SPLIT.format(q="qm", k="km", v="vm"))
    return what


def _queries(writer: Writer) -> str:
    """Makes the queries, perhaps fewer than the new rows; returns their name."""
    if writer.graph.rate != 2:
        return "q9"
    how = writer.pick("queries", "all", *TURNS, "every second", "mean of two", "largest", usual=24)
    if how in TURNS:
        writer.write(TURNS[how])
    if how in TURNS or how == "all":
        return "q9" if how == "all" else "qf"
    writer.graph.coarse = True
    heads = writer.graph.heads
    writer.write(
        f"""by_two = Constant<value_ints = [0, {heads}, -1, 2, 16]>()
        q5 = Reshape(q9, by_two)
        three_1 = Constant<value_ints = [3]>()"""
    )
    writer.write(
        {
            "every second": "q6 = Slice(q5, one, pair, three_1)\nqf = Squeeze(q6, three_1)",
            "mean of two": "qf = ReduceMean<keepdims = 0>(q5, three_1)",
            "largest": "qf = ReduceMax<keepdims = 0>(q5, three_1)",
        }[how]
    )
    return "qf"


def _attention(writer: Writer, queries: str) -> None:
    """Attends, and adds what else reads a cache."""
    graph, write, pick = writer.graph, writer.write, writer.pick
    write(f"q_s = Mul({queries}, quarter)")
    if graph.coarse:
        write("row_a = Constant<value_ints = [-2]>()")
        write("bias_q = Slice(bias, one, end, row_a, pair)")
    else:
        write("bias_q = Identity(bias)")
    if graph.heads == graph.kv_heads:
        write("k_r = Identity(present_key)\nv_r = Identity(present_value)")
    else:
        write("groups = Constant<value_ints = [1, 1, 2, 1, 1]>()")
        write(f"all_heads = Constant<value_ints = [0, {graph.heads}, -1, 16]>()")
        write(REPEATS[pick("heads", *REPEATS, usual=8)])
    how = pick("attention", *PRODUCTS, "Attention", usual=2)
    graph.floor = "seen_f"
    if how == "Attention":
        graph.opset = 23
        write("s_2 = Add(bias_q, four_d)\no = Attention<scale = 1.0>(q_s, k_r, v_r, bias_q)")
    else:
        write(PRODUCTS[how])
        if pick("softcap", "none", "1.5", usual=5) == "1.5":
            write("cap = Constant<value_float = 1.5>()\ns_c = Div(s_0, cap)\ns_h = Tanh(s_c)")
            write("s_1 = Mul(s_h, cap)")
        else:
            write("s_1 = Identity(s_0)")
        if writer.selects and not graph.coarse and pick("mask", "added", "selected") == "selected":
            write("s_2 = Where(keep, s_1, lowest)")
        else:
            write("s_2 = Add(s_1, bias_q)")
        write("p = Softmax<axis = -1>(s_2)\no = MatMul(p, v_r)")
    write("seen_f = ReduceMax<keepdims = 1>(s_2, minus_one)")
    _result(writer)


def _result(writer: Writer) -> None:
    """Makes the answer for each id of what was attended to."""
    graph, write = writer.graph, writer.write
    write(READERS[writer.pick("also reads", *READERS, usual=24)])
    write("o_1 = Transpose<perm = [0, 2, 1, 3]>(nobody)\no_2 = Reshape(o_1, merged_shape)")
    if graph.rate == 1 or graph.coarse:
        write(TWICE.format(x="o_2", y="merged"))
    elif graph.rate == 4:
        write(PAIRS.format(x="o_2", y="o_3") + "merged = ReduceMean<keepdims = 0>(o_32, pair)")
    else:
        write("merged = Identity(o_2)")
