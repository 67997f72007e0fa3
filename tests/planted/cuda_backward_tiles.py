"""Bugs planted in the backward kernels of the CUDA target: barriers, copies, shared memory and fragments."""

from __future__ import annotations

from tests.planted.bug import CudaBug

_DKDV = "backward_dkdv"


BUGS: tuple[CudaBug, ...] = (
    # Barriers and copies
    CudaBug(
        name="no barrier before q and do are read",
        attention="full",
        file=_DKDV,
        story="every thread waited for its own copies, not for those of the others",
        anchor="__syncthreads();  // the tiles are there",
        patch="// the tiles are there",
    ),
    CudaBug(
        name="no barrier before ds is read",
        attention="full",
        file=_DKDV,
        story="dq needs the ds of all keys, and other warps have them",
        anchor="__syncthreads();  // p and ds are there",
        patch="",
    ),
    CudaBug(
        name="q and do not waited for",
        attention="full",
        file=_DKDV,
        story="a copy that is only started looks finished when the memory is fast",
        anchor="if (STAGES > 1) wait_copies<STAGES - 2>();",
        patch="",
    ),
    CudaBug(
        name="waits for one group too few",
        attention="causal_gqa",
        file=_DKDV,
        story="the newest group was counted among those that may be under way",
        anchor="wait_copies<STAGES - 2>()",
        patch="wait_copies<STAGES - 1>()",
    ),
    CudaBug(
        name="q copied over the tile at hand",
        attention="full",
        file=_DKDV,
        story="the ring of buffers was indexed by the tile that is read",
        anchor="copy((stage + STAGES - 1) % STAGES);",
        patch="copy(stage);",
    ),
    CudaBug(
        name="tiles of the next head copied too early",
        attention="causal_gqa",
        file=_DKDV,
        story="the loop over a group began anew while warps still read the last tile",
        anchor="__syncthreads();  // all have read the tiles of the previous head",
        patch="",
    ),
    CudaBug(
        name="dk staged without a barrier",
        attention="full",
        file=_DKDV,
        story="rows were stored by other threads than those that put them into shared memory",
        anchor="1.0f); __syncthreads(); store_matrix",
        patch="1.0f); store_matrix",
    ),
    # Shared memory and fragments
    CudaBug(
        name="wrong swizzle",
        attention="full",
        file=_DKDV,
        story="the permuted chunk was counted on instead of being permuted again",
        anchor="(first ^ chunks % PERIOD<WIDTH> * 16)",
        patch="(first + chunks % PERIOD<WIDTH> * 16)",
    ),
    CudaBug(
        name="rows past the end not zero-filled",
        attention="full",
        file=_DKDV,
        story="0 * NaN: what lies behind q and do reached dk and dv through weights of 0",
        anchor="source, first + row + i < stop &&",
        patch="source, true &&",
    ),
    CudaBug(
        name="p^T with its halves exchanged",
        attention="full",
        file=_DKDV,
        story="the conversion puts its first operand into the high half",
        anchor="pack(pieces[i][2 * n + x / 2][x % 2 * 2], pieces[i][2 * n + x / 2][x % 2 * 2 + 1])",
        patch="pack(pieces[i][2 * n + x / 2][x % 2 * 2 + 1], pieces[i][2 * n + x / 2][x % 2 * 2])",
    ),
    CudaBug(
        name="do not transposed",
        attention="alibi",
        file=_DKDV,
        story="dP wants the rows of do as they are, dV wants them transposed",
        anchor="u32 b[4]; ldmatrix_x4_trans(b, after<WIDTH>(first,",
        patch="u32 b[4]; ldmatrix_x4(b, after<WIDTH>(first,",
    ),
    CudaBug(
        name="queries of another part",
        attention="full",
        file=_DKDV,
        story="a warp showed its piece of p^T and ds^T in the place of the first",
        anchor="left_to_tile<BLOCK_M>(ds_tile, first_key, first_query / 8, left)",
        patch="left_to_tile<BLOCK_M>(ds_tile, first_key, 0, left)",
    ),
    CudaBug(
        name="p of the others times its own do",
        attention="full",
        file=_DKDV,
        story="a warp went on with its own queries after the p of the others had come",
        anchor="add_product<DV, WHOLE_DV>(dv, left, do_tile + theirs * DV",
        patch="add_product<DV, WHOLE_DV>(dv, left, do_tile + first_query * DV",
    ),
    CudaBug(
        name="a warp reads its own p again",
        attention="full",
        file=_DKDV,
        story="the ring of parts was walked from the warp's own",
        anchor="const int theirs = (part + i) % PARTS * COLUMNS",
        patch="const int theirs = (part + i - 1) % PARTS * COLUMNS",
    ),
    CudaBug(
        name="dq gathered from the wrong lanes",
        attention="full",
        file="backward_finish",
        story="the second row of a fragment is 8 below the first, not the next",
        anchor="e = row / 8 % 2 * 2",
        patch="e = row % 2 * 2",
    ),
    CudaBug(
        name="mask on the wrong columns",
        attention="causal_gqa",
        file=_DKDV,
        story="a lane was thought to hold columns t and t + 4 of a fragment",
        anchor="q_lo + first_query + 8 * j + 2 * t + c",
        patch="q_lo + first_query + 8 * j + t + 4 * c",
    ),
)
