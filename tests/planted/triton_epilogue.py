"""Bugs planted in what becomes of the rows of o before they leave, and in its gradients."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="gate of another head",
        attention="gated",
        story="the gate was addressed by the K/V head, which grouped queries share",
        anchor="+ h.to(tl.int64) * stride_gate_2",
        patch="+ h_kv.to(tl.int64) * stride_gate_2",
    ),
    TritonBug(
        name="gate before the division",
        attention="gated",
        story="the gate was applied to the sum, and the sum divided by the row's l once more",
        anchor="o = tl.sigmoid(gate_tile) * o",
        patch="o = tl.sigmoid(gate_tile) * o * (1.0 / tl.where(l == 0.0, 1.0, l))[:, None]",
    ),
    TritonBug(
        name="gate of the column's row",
        attention="gated",
        story="the gate was taken for a number of each row",
        anchor="+ d[None, :].to(tl.int64) * stride_gate_3",
        patch="+ d[None, :].to(tl.int64) * 0",
    ),
    TritonBug(
        name="gated rows kept as the attention",
        attention="gated",
        story="what the backward reads was stored after the gate",
        anchor="""if attention_ptr is not None:
            _store_rows(attention_ptr""",
        patch="""if attention_ptr is not None:
            o = o * 0.5
            _store_rows(attention_ptr""",
    ),
    TritonBug(
        name="gradient of o for that of the attention",
        attention="gated",
        story="the slope was left out, as if the epilogue were not there",
        anchor="do = tl.where(inside, dresult * tl.sigmoid(gate_tile), 0.0)",
        patch="do = tl.where(inside, dresult, 0.0)",
        phase="backward",
    ),
    TritonBug(
        name="slope of sigmoid without its second factor",
        attention="gated",
        story="sigmoid' is s (1 - s), and s was written",
        anchor="* (1.0 - tl.sigmoid(gate_tile))",
        patch="",
        phase="backward",
    ),
    TritonBug(
        name="gradient of the gate in rows of another head",
        attention="gated",
        story="the workspace is [B, H, M, D], and was filled as [B, M, H, D]",
        anchor="dgate_ptr + ((b * H + h).to(tl.int64) * M_padded + q_idx)[:, None] * NUMBER",
        patch="dgate_ptr + ((b * M_padded).to(tl.int64) + q_idx * H + h)[:, None] * 128",
        phase="backward",
    ),
)
