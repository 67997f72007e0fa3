"""Bugs planted in epilogues, and in weights without a softmax, of CUDA kernels."""

from __future__ import annotations

from tests.planted.bug import Bug, CudaBug, HopperBug

BUGS: tuple[Bug, ...] = (
    CudaBug(
        name="gate of another head",
        attention="gated",
        story="the gate was addressed by the K/V head, which grouped queries share",
        anchor="+ h * args.stride_gate_2",
        patch="+ h_kv * args.stride_gate_2",
    ),
    CudaBug(
        name="gate before the division",
        attention="gated",
        story="the gate was applied to the sum, and the sum divided by the row's l once more",
        anchor="o = sigmoid_(gate_tile) * o;",
        patch="o = sigmoid_(gate_tile) * o * scale;",
    ),
    CudaBug(
        name="gated rows kept as the attention",
        attention="gated",
        story="what the backward reads was stored after the gate",
        anchor="element{(unsigned short)pack(acc[r / 2][j][r % 2 * 2 + c], 0.0f)};",
        patch="element{(unsigned short)pack(acc[r / 2][j][r % 2 * 2 + c] * 0.5f, 0.0f)};",
    ),
    CudaBug(
        name="gradient of o for that of the attention",
        attention="gated",
        story="the slope was left out, as if the epilogue were not there",
        anchor="pack(inside ? dresult * (sigmoid_(gate_tile)) : 0.0f, 0.0f)",
        patch="pack(inside ? dresult : 0.0f, 0.0f)",
        file="backward_epilogue",
    ),
    CudaBug(
        name="gradient of the gate from the gated rows",
        attention="gated",
        story="o was what had left, gate and all",
        anchor="dresult * (o * (sigmoid_(gate_tile) * (1.0f - sigmoid_(gate_tile))))",
        patch="dresult * (o * sigmoid_(gate_tile) * (sigmoid_(gate_tile) * (1.0f - sigmoid_(gate_tile))))",
        file="backward_epilogue",
    ),
    CudaBug(
        name="derivative of masked weights",
        attention="hstu",
        story="p is 0 there, and was thought to be a factor of ds, as under a softmax",
        anchor="scores[r / 2][j][r % 2 * 2 + c] = gradients[r / 2][j][r % 2 * 2 + c] = 0.0f;",
        patch="scores[r / 2][j][r % 2 * 2 + c] = 0.0f;",
        file="backward_dkdv",
    ),
    HopperBug(
        name="gate of the next columns",
        attention="gated",
        story="pairs of columns came by 16 bytes, and were used before lanes had exchanged them",
        anchor="pairs[j + 2], pairs[j + 3]}; if (by_chunks) exchange_pairs(x, t);",
        patch="pairs[j + 2], pairs[j + 3]};",
    ),
    HopperBug(
        name="gate of the other column of a pair",
        attention="gated",
        story="the lower half of a word is the first column, not the second",
        anchor="(gate_tile_pairs[r][j] >> 16 * c)",
        patch="(gate_tile_pairs[r][j] >> 16 * (1 - c))",
    ),
    HopperBug(
        name="division by the queries of the call",
        attention="hstu",
        story="N of a jagged sequence was taken for the length of the whole batch",
        anchor="v_scale[r] = 1.0f / max(N, 1);",
        patch="v_scale[r] = 1.0f / max(M + 1, 1);",
    ),
    HopperBug(
        name="slopes of masked weights",
        attention="hstu",
        story="p is 0 there, and was thought to be a factor of ds, as under a softmax",
        anchor="scores[j][2 * r + c] = 0.0f; left_p",
        patch="left_p",
        file="backward_dkdv",
    ),
    HopperBug(
        name="dk and dv of the last keys without their factor",
        attention="hstu",
        story="what leaves by itself was multiplied, and sums of parts were not",
        anchor="(to + 8 * j) = {dv[j][2 * r] * (1.0f / max(N, 1)), dv[j][2 * r + 1] * (1.0f / max(N, 1))};",
        patch="(to + 8 * j) = {dv[j][2 * r], dv[j][2 * r + 1]};",
        file="backward_dkdv",
    ),
)
