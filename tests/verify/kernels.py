# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton kernels carry no annotations but tl.constexpr.
"""Small Triton kernels that exercise what generated kernels use of the language."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def cast(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.store(y_ptr + i, x.to(y_ptr.dtype.element_ty), mask=i < N)


@triton.jit
def double(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x + x)


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = i[:, None] * BLOCK + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(c_ptr + at, tl.dot(a, b, input_precision=PRECISION))


@triton.jit
def functions(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Rows: exp2, log2, libdevice tanh, tanh.approx, ex2.approx, maximum(x, 0), and the row maximum."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.exp2(x))
    tl.store(y_ptr + BLOCK + i, tl.log2(x))
    tl.store(y_ptr + 2 * BLOCK + i, libdevice.tanh(x))
    approx = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    tl.store(y_ptr + 3 * BLOCK + i, approx)
    approx = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    tl.store(y_ptr + 4 * BLOCK + i, approx)
    tl.store(y_ptr + 5 * BLOCK + i, tl.maximum(x, 0.0))
    tl.store(y_ptr + 6 * BLOCK + i, tl.max(x, 0) + tl.zeros([BLOCK], tl.float32))


@triton.jit
def philox(seed, y_ptr, M, N, h, b, BLOCK: tl.constexpr):
    """Words of the dropout mask in kv order: four keys per call, joined along the last axis."""
    q_idx = tl.arange(0, BLOCK)
    quads = tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = tl.philox(
        seed,
        quads[None, :] + tl.zeros_like(q_idx)[:, None],
        q_idx[:, None] + tl.zeros_like(quads)[None, :],
        h,
        b,
        n_rounds=7,
    )
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK, BLOCK])
    kv_idx = tl.arange(0, BLOCK)
    inside = (q_idx[:, None] < M) & (kv_idx[None, :] < N)
    tl.store(y_ptr + q_idx[:, None] * N + kv_idx[None, :], words.to(tl.int64), mask=inside)


@triton.jit
def descriptor(x_ptr, y_ptr, M, N, stride_x, stride_y, BLOCK: tl.constexpr):
    """Copies [M, N] through tensor descriptors, tile by tile, in a while loop."""
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[stride_x, 1], block_shape=[BLOCK, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[stride_y, 1], block_shape=[BLOCK, BLOCK])
    row = tl.program_id(0) * BLOCK
    n = 0
    while n < N:
        y.store([row, n], x.load([row, n]))
        n += BLOCK


@triton.jit
def stray(x_ptr, y_ptr, N, shift, BLOCK: tl.constexpr):
    """Right for shift 0 and one program."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i + shift, mask=i < N, other=0.0)
    tl.store(y_ptr + i, x, mask=i < N)


@triton.jit
def add(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + i, tl.load(x_ptr + i, mask=i < N, other=0.0), mask=i < N, sem="relaxed")


@triton.jit
def without_other(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N)
    tl.store(y_ptr + i, x, mask=i < N)


@triton.jit
def scale_in_place(x_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < N, other=0.0) * 2, mask=i < N)
