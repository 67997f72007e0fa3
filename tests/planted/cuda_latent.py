"""Bugs planted in gradients of values that are columns of keys, by mma.sync: what warps show each other."""

from __future__ import annotations

from tests.planted.bug import CudaBug

BUGS: tuple[CudaBug, ...] = (
    CudaBug(
        name="p and ds not waited for",
        attention="cuda_latent",
        file="backward_dk",
        story="each warp read its own p and ds once",
        anchor="__syncthreads();  // p and ds are there",
        patch="",
    ),
    CudaBug(
        name="values without a gradient",
        attention="cuda_latent",
        file="backward_dk",
        story="dv had a tensor of its own, and went with it",
        anchor="add_product<DV, false>(dk, left, do_tile, own_column);",
        patch="",
    ),
    CudaBug(
        name="columns of a warp from the first column on",
        attention="cuda_latent",
        file="backward_dq",
        story="a warp had all columns of its rows once",
        anchor="add_product<D, WHOLE_D>(dq, left, k_tile, own_column);",
        patch="add_product<D, WHOLE_D>(dq, left, k_tile, 0);",
    ),
    CudaBug(
        name="keys of the first warp under the mask of all",
        attention="cuda_latent",
        file="backward_dq",
        story="a warp had all keys of its rows once",
        anchor="kv_lo + first_key + 8 * j + 2 * t + c",
        patch="kv_lo + 8 * j + 2 * t + c",
    ),
    CudaBug(
        name="heads of the first part alone",
        attention="cuda_latent",
        file="backward_add",
        story="one block had all heads of its keys once",
        anchor="for (int part = 0; part < args.WALK_PARTS; ++part)",
        patch="for (int part = 0; part < 1; ++part)",
    ),
    CudaBug(
        name="heads of a part in all parts behind it, too",
        attention="cuda_latent",
        file="backward_dk",
        story="the loop over heads went on from the first head of a part",
        anchor="group += args.WALK_PARTS",
        patch="++group",
    ),
)
