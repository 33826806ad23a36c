"""Who counts the tokens of a random graph, and who says which keys a query sees."""

from __future__ import annotations

from tests.decoders.random_graphs import MASK, POSITIONS, PREFIX, TWICE, Writer

COLUMNS = ("present", "total", "mask", "kept")
PREFIXED = {
    "concat": "joined = Concat<axis = 1>(front, marks)",
    "pad": """ends_p = Constant<value_ints = [0, 2, 0, 0]>()
        joined = Pad(marks, ends_p, one_i)""",
    "gather": """count_p = Shape<start = 1, end = 2>(marks)
        long_p = Add(count_p, pair)
        long_0 = Squeeze(long_p)
        all_p = Range(zero, long_0, step)
        back_p = Sub(all_p, two)
        at_p = Max(back_p, zero)
        joined = Gather<axis = 1>(marks, at_p)""",
    "matmul": """count_p = Shape<start = 1, end = 2>(marks)
        long_p = Add(count_p, pair)
        long_0 = Squeeze(long_p)
        count_0 = Squeeze(count_p)
        all_p = Range(zero, long_0, step)
        back_p = Sub(all_p, two)
        at_p = Max(back_p, zero)
        here_p = Range(zero, count_0, step)
        here_u = Unsqueeze(here_p, one)
        hit_p = Equal(here_u, at_p)
        hot_p = Cast<to = 1>(hit_p)
        marks_f = Cast<to = 1>(marks)
        moved_p = MatMul(marks_f, hot_p)
        joined = Cast<to = 7>(moved_p)""",
    "scatter": """count_p = Shape<start = 1, end = 2>(marks)
        batch_p = Shape<start = 0, end = 1>(marks)
        long_p = Add(count_p, pair)
        count_0 = Squeeze(count_p)
        ones_s = Concat<axis = 0>(batch_p, long_p)
        ones_p = Expand(one_i, ones_s)
        here_p = Range(zero, count_0, step)
        shift_p = Add(here_p, two)
        marks_s = Shape(marks)
        at_p = Expand(shift_p, marks_s)
        joined = ScatterElements<axis = 1>(ones_p, at_p, marks)""",
}
"""Ways of a mask of the tokens to the columns of a cache that begins with learned rows."""


def make_lengths(writer: Writer, rows: str, *columns_of: str) -> None:
    """Counts new and old rows, the queries' places and the columns."""
    graph, write = writer.graph, writer.write
    write(
        "new = Shape<start = 2, end = 3>(k9)"
        if rows != "plain"
        else {
            "ids": "new = Shape<start = 1, end = 2>(input_ids)",
            "rows": "new = Shape<start = 2, end = 3>(k9)",
        }[writer.pick("new from", "ids", "rows")]
    )
    static = graph.static
    old = writer.pick("old from", "cache", "values", "mask", "given", "positions", usual=5)
    if static:
        write("old = Unsqueeze(start, zero_1)")
    elif old == "given":
        writer.take("past_length", "int64")
        write("old = Unsqueeze(past_length, zero_1)")
    elif old in ("cache", "values"):
        write(f"old = Shape<start = 2, end = 3>(past_{'key' if old == 'cache' else 'value'})")
    elif old == "mask":
        writer.mask()
        write(f"all_m = Shape<start = 1, end = 2>({MASK})\nold = Sub(all_m, new)")
    else:
        writer.positions()
        write(f"old_p = ReduceMin<keepdims = 0>({POSITIONS})\nold = Unsqueeze(old_p, zero_1)")
    columns = "present"
    if not static:
        usual = columns_of or COLUMNS
        columns = writer.pick("columns", *(usual if graph.rate == 2 else usual[:1]), usual=4)
    if columns in ("present", "total"):
        text = "Shape<start = 2, end = 3>(present_key)" if columns == "present" else "Add(old, new)"
        write(f"total = {text}\ntotal0 = Squeeze(total)\nslots = Range(zero, total0, step)")
    else:
        writer.mask()
        writer.by_ids = True
        write(
            f"total = Shape<start = 1, end = 2>({MASK})\ntotal0 = Squeeze(total)"
            "\nslots = Range(zero, total0, step)"
            if columns == "mask"
            else f"total = Shape<start = 1, end = 2>({MASK})\nkept_c = CumSum({MASK}, step)"
            "\nkept_1 = Sub(kept_c, step)\nslots = Unsqueeze(kept_1, middle)"
        )
    places = writer.pick("places", "counted", "positions", "cache positions", "kept", usual=4)
    if places == "counted":
        write("new0 = Squeeze(new)\nsteps = Range(zero, new0, step)")
        write("standing = Add(steps, old)\nplaces = Unsqueeze(standing, one)")
    elif places == "positions":
        writer.positions()
        write(f"places = Unsqueeze({POSITIONS}, sides)")
    elif places == "cache positions":
        writer.take("cache_position", "int64[T]")
        write("places = Unsqueeze(cache_position, one)")
    else:
        writer.mask()
        write(f"cum_r = CumSum({MASK}, step)\ncum_1 = Sub(cum_r, step)\nlate = Neg(new)")
        write("cum_t = Slice(cum_1, late, end, one)\nplaces = Unsqueeze(cum_t, sides)")


def make_bias(writer: Writer) -> None:
    """Says which keys a query sees: ``bias``, broadcast to ``[B, 1, T, S]``."""
    graph, write, pick = writer.graph, writer.write, writer.pick
    said = pick("said by", "the graph", "visible", "bias", usual=8)
    if said != "the graph":
        kind, tokens = ("bool", "visible") if said == "visible" else ("float", "given_bias")
        writer.take(tokens, f"{kind}[B, 1, T, {'M' if graph.static else 'S'}]")
    if said == "bias":
        write("bias = Identity(given_bias)")
        return
    writer.selects = True
    if said == "visible":
        write("keep = Identity(visible)")
    else:
        _order(writer)
        _padding(writer)
        _more(writer)
    fill = pick("fill", "lowest", "-1e9", usual=6)
    write(
        "fill = " + {"lowest": "Identity(lowest)", "-1e9": "Constant<value_float = -1.0e9>()"}[fill]
    )
    if writer.by_ids and pick("front of the bias", "none", "zeros", usual=3) == "zeros":
        # Columns for learned rows come last, when the mask is floats already.
        graph.prefix, writer.selects = PREFIX, False
        write(
            "bias_w = Where(keep, nothing, fill)\nfront_b = Slice(bias_w, zero_1, pair, minus_one)"
        )
        write("front_z = Mul(front_b, nothing)\nbias = Concat<axis = -1>(front_z, bias_w)")
    else:
        write("bias = Where(keep, nothing, fill)")


def _order(writer: Writer) -> None:
    write, pick = writer.write, writer.pick
    write(
        {
            "at most": "causal = LessOrEqual(slots, places)",
            "not after": "later = Greater(slots, places)\ncausal = Not(later)",
            "none": "apart = Sub(slots, places)\ncausal = Equal(apart, apart)",
        }[pick("order", "at most", "not after", "none", usual=6)]
    )
    if pick("window", "none", "4", usual=5) == "4":
        write("oldest = Sub(places, four)\nrecent = Greater(slots, oldest)")
        write("keep_1 = And(causal, recent)")
    else:
        write("keep_1 = Identity(causal)")


def _padding(writer: Writer) -> None:
    graph, write, pick = writer.graph, writer.write, writer.pick
    padding = "none" if graph.static else pick("padding", "bools", "none", "expanded", usual=4)
    if padding == "none":
        write("keep_2 = Identity(keep_1)")
        return
    writer.mask()
    write("one_i = Constant<value_int = 1>()")
    write(
        {
            1: "m_s = Concat<axis = 0>(zero_1, minus_one, pair)"
            f"\nm_p = Reshape({MASK}, m_s)\nmarks = ReduceMax<keepdims = 0>(m_p, third)",
            2: f"marks = Identity({MASK})",
            4: TWICE.format(x=MASK, y="marks"),
        }[graph.rate]
    )
    # A column for each row of the cache, not for each id.
    prefix = "none" if writer.by_ids else pick("prefix", "none", "cut", *PREFIXED, usual=12)
    if prefix == "none":
        write("joined = Identity(marks)")
    elif prefix == "cut":
        graph.cut = True
        write("joined = Slice(marks, zero_1, total, one)")
    else:
        graph.prefix = PREFIX
        write("front_s = Shape<start = 0, end = 1>(marks)")
        write("front_w = Concat<axis = 0>(front_s, pair)\nfront = Expand(one_i, front_w)")
        write(PREFIXED[prefix])
    write("bools = Cast<to = 9>(joined)\nkept = Unsqueeze(bools, middle)")
    if padding == "expanded":
        write("keep_s = Shape(keep_1)\nkept_w = Expand(kept, keep_s)\nkeep_2 = And(kept_w, keep_1)")
    else:
        write("keep_2 = And(kept, keep_1)")


def _more(writer: Writer) -> None:
    graph, write, pick = writer.graph, writer.write, writer.pick
    more = "none" if graph.static else pick("more", "none", "segments", "hidden list", usual=10)
    if more == "segments":
        axis = pick("axis of the segments", "S", "G", usual=1)
        writer.take("segments", f"int64[B, {axis}]")
        write("late_g = Neg(new)\nown_g = Slice(segments, late_g, end, one)")
        write("own_u = Unsqueeze(own_g, sides)\nall_u = Unsqueeze(segments, middle)")
        write("same_g = Equal(own_u, all_u)\nkeep = And(keep_2, same_g)")
    elif more == "hidden list":
        writer.take("hidden", "int64[B, L]")
        write(
            "batch_h = Shape<start = 0, end = 1>(hidden)\nall_h = Concat<axis = 0>(batch_h, total)"
        )
        write("ones_h = Expand(step, all_h)\nzeros_h = Mul(hidden, zero)")
        write("flags_h = ScatterElements<axis = 1>(ones_h, hidden, zeros_h)")
        write("bools_h = Cast<to = 9>(flags_h)\nfree_h = Unsqueeze(bools_h, middle)")
        write("keep = And(keep_2, free_h)")
    else:
        write("keep = Identity(keep_2)")
