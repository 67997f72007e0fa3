"""Bugs of precision and of order: sums and products in 16 bits, and sums that depend on who comes first."""

from __future__ import annotations

from tests.planted.bug import Bug, CudaBug, Place, TritonBug

BUGS: tuple[Bug, ...] = (
    TritonBug(
        name="dq summed in bf16",
        attention="full",
        story="the accumulator was kept in the type of the result to save registers",
        anchor="dq = tl.dot(ds.to(k.dtype), k, dq)",
        patch="dq = tl.dot(ds.to(k.dtype), k, dq).to(tl.bfloat16).to(tl.float32)",
        phase="backward",
    ),
    TritonBug(
        name="dq kept in 16 bits of a word",
        attention="full",
        story="two sums share a register, each rounded to nearest, and only many tiles of one sign show it",
        anchor="dq = tl.dot(ds.to(k.dtype), k, dq)",
        patch="dq = tl.dot(ds.to(k.dtype), k, dq)\n"
        "    dq = ((dq.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)",
        phase="backward",
    ),
    TritonBug(
        name="dv summed in bf16",
        attention="causal_gqa",
        story="the accumulator was kept in the type of the result to save registers",
        anchor="dv = tl.dot(p.to(do.dtype), do, dv)",
        patch="dv = tl.dot(p.to(do.dtype), do, dv).to(tl.bfloat16).to(tl.float32)",
        phase="backward",
    ),
    CudaBug(
        name="dq summed in bf16",
        attention="fa1",
        file="backward_dkdv",
        story="half the memory, and half the traffic",
        anchor="sum[((i * (DQ_COLUMNS / 8) + j) * 4 + e) * THREADS] += dq[i][j][e];",
        patch="{\n    float& to = sum[((i * (DQ_COLUMNS / 8) + j) * 4 + e) * THREADS];\n"
        "    to = __uint_as_float(__float_as_uint(to + dq[i][j][e]) & 0xffff0000u);\n}",
    ),
    TritonBug(
        name="o summed in bf16",
        attention="full",
        story="the accumulator was kept in the type of the result to save registers",
        anchor="acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])",
        patch="acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None]).to(tl.bfloat16).to(tl.float32)",
    ),
    TritonBug(
        name="delta from 16-bit products",
        attention="full",
        story="the conversion came after the multiplication",
        anchor="tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)",
        patch="tl.sum((o * do).to(tl.float32), 1)",
        phase="backward",
    ),
    TritonBug(
        name="delta summed in bf16",
        attention="causal_gqa",
        story="o and do are bf16, and so was their sum",
        anchor="tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)",
        patch="tl.sum((o.to(tl.float32) * do.to(tl.float32)).to(tl.bfloat16), 1).to(tl.float32)",
        phase="backward",
    ),
    CudaBug(
        name="delta kept in bf16",
        attention="full",
        file="backward_preprocess",
        story="what the rows hand on was stored like the tensors beside it",
        anchor="args.delta_ptr[first_row + q_idx] = delta;",
        patch="args.delta_ptr[first_row + q_idx] = __uint_as_float(__float_as_uint(delta) & 0xffff0000u);",
    ),
    # Who comes first
    TritonBug(
        name="two passes in one",
        attention="alibi",
        story="the second pass was saved by atomic additions, and no two runs were alike",
        anchor="tl.store(dslope_ptr + (b * H + h).to(tl.int64) * q_tiles + q_lo // BLOCK_M,",
        patch="tl.atomic_add(dslope_ptr + (b * H + h).to(tl.int64) * q_tiles,",
        also=(
            Place(
                anchor='Made("dslope", type="f32[B, H, M_padded // dq_config.BLOCK_M]")',
                patch='Made("dslope", type="f32[B, H, M_padded // dq_config.BLOCK_M]", zero=True)',
                phase="backward",
            ),
        ),
        phase="backward",
    ),
    CudaBug(
        name="two passes in one",
        attention="alibi",
        file="backward_dq",
        story="the second pass was saved by atomic additions, and no two runs were alike",
        anchor="args.dslope_ptr[(long long)(b * H + h) * q_tiles + q_lo / BLOCK_M] = dslope_total;",
        patch="atomic_add(&args.dslope_ptr[(long long)(b * H + h) * q_tiles], dslope_total);",
        also=(
            Place(
                anchor='Made("dslope", type="f32[B, H, M_padded // dq_config.BLOCK_M]")',
                patch='Made("dslope", type="f32[B, H, M_padded // dq_config.BLOCK_M]", zero=True)',
                file="host",
                phase="backward",
            ),
        ),
    ),
)
