"""Random decoders whose attention is one operator that updates the caches, or is told of them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.decoders.random_attention import READERS
from tests.decoders.random_graphs import HEADER, SPLIT, RandomGraph, Writer
from tests.decoders.random_masks import make_bias, make_lengths

SEQUENCES = {
    "kept": """kept_q = ReduceSum<keepdims = 0>(attention_mask, one)
        kept_q32 = Cast<to = 6>(kept_q)
        lengths = Sub(kept_q32, one_32)""",
    "length": """long_q = Shape<start = 1, end = 2>(attention_mask)
        batch_q = Shape<start = 0, end = 1>(input_ids)
        each_q = Expand(long_q, batch_q)
        each_32 = Cast<to = 6>(each_q)
        lengths = Sub(each_32, one_32)""",
    "cache": """old_q = Shape<start = 2, end = 3>(past_key)
        new_q = Shape<start = 1, end = 2>(input_ids)
        long_q = Add(old_q, new_q)
        batch_q = Shape<start = 0, end = 1>(input_ids)
        each_q = Expand(long_q, batch_q)
        each_32 = Cast<to = 6>(each_q)
        lengths = Sub(each_32, one_32)""",
    "given": "lengths = Identity(seqlens_k)",
}
"""Ways of GroupQueryAttention to the lengths of its sequences."""


@st.composite
def fused(draw: st.DrawFn) -> RandomGraph:
    """Draws a decoder whose attention is one operator that has the caches, or is told of them."""
    writer = Writer(draw)
    graph, write, pick = writer.graph, writer.write, writer.pick
    write(HEADER)
    kind = pick("operator", *FUSED, usual=1)
    if kind != "MultiHeadAttention":
        graph.heads = draw(st.sampled_from([2, 4]))
    FUSED[kind](writer)
    reader = pick("also reads", *(name for name in READERS if name != "the scores"), usual=14)
    write("o = Identity(fused)")
    # Its result is [B, T, H * D]: other ranks do not fit.
    if reader in ("none", "its size", "the old size", "its sum", "the old rows"):
        write(READERS[reader])
    else:
        write("last_n = Slice(present_key, minus_one, end, third)")
        write("mean_n = ReduceMean<keepdims = 0>(last_n)\nnobody = Add(o, mean_n)")
    write("merged = Identity(nobody)")
    writer.leave()
    graph.body = "\n".join(writer.lines)
    return graph


def _group_query(writer: Writer) -> None:
    graph, write, pick = writer.graph, writer.write, writer.pick
    write("one_32 = Constant<value = int32[1] {1}>()")
    lengths = pick("lengths", *SEQUENCES)
    if lengths == "given":
        writer.take("seqlens_k", "int32[B]")
    elif lengths != "cache":
        writer.mask()
    write(SEQUENCES[lengths])
    total = pick("total", "mask", "cache", "given")
    if total == "mask":
        writer.mask()
        write("total_q = Shape<start = 1, end = 2>(attention_mask)")
    elif total == "cache":
        write("before_q = Shape<start = 2, end = 3>(past_value)")
        write("fresh_q = Shape<start = 1, end = 2>(input_ids)\ntotal_q = Add(before_q, fresh_q)")
    else:
        writer.take("total_length", "int64")
        write("total_q = Unsqueeze(total_length, zero_1)")
    write("total_32 = Cast<to = 6>(total_q)\ntotal_s = Squeeze(total_32)")
    extras = [f"num_heads = {graph.heads}", "kv_num_heads = 2"]
    extras += {"none": [], "4": ["local_window_size = 4"]}[pick("window", "none", "4", usual=4)]
    extras += {"none": [], "1.5": ["softcap = 1.5"]}[pick("softcap", "none", "1.5", usual=5)]
    bias = ""
    if pick("bias", "none", "given", usual=4) == "given":
        writer.take("given_bias", "float[B, 1, T, S]")
        bias = ', "", "", "", given_bias'
    write(
        "fused, present_key, present_value = com.microsoft.GroupQueryAttention"
        f"<{', '.join(extras)}>(q0, k0, v0, past_key, past_value, lengths, total_s{bias})"
    )


def _graph_bias(writer: Writer) -> None:
    """Makes a mask of rank 4 before there are caches."""
    writer.write(SPLIT.format(q="q0", k="k0", v="v0"))
    make_lengths(writer, "plain", "total", "mask", "kept")
    make_bias(writer)
    writer.write("bias_4 = Add(bias, four_d)")


def _tell_seen(writer: Writer, causal: str) -> None:
    """Leaves to be seen which queries see no key, by the mask and by the operator's own."""
    hidden = "bias_4"
    if causal == "1":
        writer.write(
            """
            own_total = Squeeze(total)
            own_new = Squeeze(new)
            own_slots = Range(zero, own_total, step)
            own_steps = Range(zero, own_new, step)
            own_places = Add(own_steps, old)
            own_rows = Unsqueeze(own_places, one)
            own_causal = LessOrEqual(own_slots, own_rows)
            own_bias = Where(own_causal, bias_4, lowest)
            """
        )
        hidden = "own_bias"
    writer.write(f"seen_f = ReduceMax<keepdims = 1>({hidden}, minus_one)")
    writer.graph.floor = "seen_f"


def _multi_head(writer: Writer) -> None:
    _graph_bias(writer)
    causal = writer.pick("causal", "0", "1", usual=6)
    _tell_seen(writer, causal)
    writer.write(
        "fused, present_key, present_value = com.microsoft.MultiHeadAttention"
        f"<num_heads = 2, unidirectional = {causal}>"
        '(q0, k0, v0, "", "", bias_4, past_key, past_value)'
    )


def _standard(writer: Writer) -> None:
    graph, write, pick = writer.graph, writer.write, writer.pick
    graph.opset = 23
    _graph_bias(writer)
    causal = pick("causal", "0", "1", usual=2)
    _tell_seen(writer, causal)
    told = pick("mask", "bias", "none", usual=4)
    mask = "bias_4" if told == "bias" else '""'
    write(
        f"o_a, present_key, present_value = Attention<is_causal = {causal}>"
        f"(q9, k9, v9, {mask}, past_key, past_value)"
    )
    write("o_b = Transpose<perm = [0, 2, 1, 3]>(o_a)\nfused = Reshape(o_b, merged_shape)")


def _tensor_scatter(writer: Writer) -> None:
    graph, write, pick = writer.graph, writer.write, writer.pick
    graph.opset, graph.static = 24, True
    write(SPLIT.format(q="q0", k="k0", v="v0"))
    writer.take("write_indices", "int64[B]")
    write("present_key = TensorScatter<axis = 2>(past_key, k9, write_indices)")
    write("present_value = TensorScatter<axis = 2>(past_value, v9, write_indices)")
    told = pick("keys told by", "valid", "visible", "both", usual=1)
    mask, valid = '""', ""
    if told != "visible":
        writer.take("valid", "int64[B]")
        valid = ', "", "", valid'
    if told != "valid":
        writer.take("visible", "bool[B, 1, T, M]")
        mask = "visible"
    causal = pick("causal", "1", "0", usual=2) if valid else "0"
    write(f"o_a = Attention<is_causal = {causal}>(q9, present_key, present_value, {mask}{valid})")
    write("o_b = Transpose<perm = [0, 2, 1, 3]>(o_a)\nfused = Reshape(o_b, merged_shape)")


FUSED = {
    "GroupQueryAttention": _group_query,
    "MultiHeadAttention": _multi_head,
    "Attention": _standard,
    "TensorScatter": _tensor_scatter,
}
