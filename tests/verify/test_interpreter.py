"""The interpreter computes what a GPU would, bit for bit where that is defined, and guards addresses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnc.reference import philox
from attnc.verify.interpreter import PrecisionFault, ensure_interpreter, is_interpreting, lanes
from attnc.verify.memory import MemoryFault, guarding
from tests.processes import run_program
from tests.verify import kernels


def every_half() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16)


def awkward_floats() -> torch.Tensor:
    """Ties, overflows, subnormals, infinities and NaN among random bit patterns."""
    bits = torch.randint(-(2**31), 2**31 - 1, (40_000,), generator=torch.Generator().manual_seed(0))
    ties = (bits // 2**16 * 2**16) + 2**15
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45, 9.2e-41])
    return torch.cat([torch.cat([bits, ties]).to(torch.int32).view(torch.float32), special])


def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    kernels.cast[(-(-x.numel() // 4096),)](x, y, x.numel(), 4096)
    return y


def test_it_is_the_interpreter() -> None:
    ensure_interpreter()
    assert is_interpreting()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_equals_torch(dtype: torch.dtype) -> None:
    x = awkward_floats()
    got, expected = convert(x, dtype), x.to(dtype)
    number = ~x.isnan()
    assert torch.equal(got[number].view(torch.int16), expected[number].view(torch.int16))
    assert got[~number].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_equals_torch(dtype: torch.dtype) -> None:
    x = every_half().view(dtype)
    got, expected = convert(x, torch.float32), x.float()
    assert torch.equal(got[~x.isnan()], expected[~x.isnan()])
    assert got[x.isnan()].isnan().all()
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    assert torch.equal(convert(x, other)[~x.isnan()], x.to(other)[~x.isnan()])


def number_of(code: int, exponent_bits: int) -> float:
    """What a code of 8 bits means (Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433)."""
    digits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    sign, exponent, rest = code >> 7, code >> digits & 2**exponent_bits - 1, code & 2**digits - 1
    if exponent == 2**exponent_bits - 1 and exponent_bits == 5:
        size = math.inf if rest == 0 else math.nan
    elif code & 0x7F == 0x7F:
        size = math.nan
    elif exponent == 0:
        size = rest * 2.0 ** (1 - bias - digits)
    else:
        size = (1 + rest / 2**digits) * 2.0 ** (exponent - bias)
    return -size if sign else size


def same_numbers(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether bits are the same, but for those of NaN."""
    numbers = ~expected.isnan()
    bits = got[numbers].view(torch.int16), expected[numbers].view(torch.int16)
    return torch.equal(*bits) and bool(got[~numbers].isnan().all())


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dtype", "exponent_bits"), [(torch.float8_e4m3fn, 4), (torch.float8_e5m2, 5)])
def test_every_code_of_8_bits_is_converted_exactly(
    dtype: torch.dtype, exponent_bits: int, element: torch.dtype
) -> None:
    codes = torch.arange(256).to(torch.uint8)
    exact = torch.tensor([number_of(code, exponent_bits) for code in range(256)], dtype=torch.float64)
    largest = exact[exact.isfinite()].max().item()
    assert largest == (448 if exponent_bits == 4 else 57344)
    halfway = convert(codes.view(dtype), torch.float16)  # as kernels convert e5m2
    got = convert(halfway, element)
    assert torch.equal(got[~exact.isnan()].double(), exact[~exact.isnan()])
    assert same_numbers(got, exact.to(element))
    if dtype == torch.float8_e4m3fn:
        assert same_numbers(convert(codes.view(dtype), element), exact.to(element))


def test_e5m2_becomes_bf16_as_it_does_on_a_gpu() -> None:
    """Triton's own conversion has no infinities: kernels go by way of f16."""
    codes = torch.arange(256).to(torch.uint8)
    got = convert(codes.view(torch.float8_e5m2), torch.bfloat16).float()
    for code, value in enumerate(got.tolist()):
        exact = number_of(code, 5)
        if not math.isfinite(exact):
            exact = math.copysign(65536 * (1 + (code & 3) / 4), -1 if code > 127 else 1)
        assert value == exact


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
def test_every_integer_of_8_bits_is_converted_exactly(element: torch.dtype) -> None:
    x = torch.arange(-128, 128).to(torch.int8)
    assert torch.equal(convert(x, element).double(), x.double())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_8_bits_are_not_computed_with(dtype: torch.dtype) -> None:
    x = torch.ones(64).to(dtype)
    with pytest.raises(PrecisionFault, match="arithmetic in 8 bits: add of"):
        kernels.double[(1,)](x, x.clone(), 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_accumulates_in_float32(dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(1)
    a, b = (torch.randn(64, 64, generator=make).to(dtype) for _ in range(2))
    c = torch.empty(64, 64)
    kernels.dot[(1,)](a, b, c, "ieee", 64)
    exact = a.double() @ b.double()
    assert (c.double() - exact).abs().max() < 64 * 2.0**-24 * (a.double().abs() @ b.double().abs()).max()


def test_tf32_reads_ten_bits() -> None:
    a, c = torch.eye(16) * (1 + 2.0**-11), torch.empty(16, 16)
    kernels.dot[(1,)](a, torch.eye(16), c, "tf32", 16)
    assert torch.equal(c, torch.eye(16))
    kernels.dot[(1,)](a, torch.eye(16), c, "ieee", 16)
    assert torch.equal(c, a)


def test_functions() -> None:
    x = torch.linspace(-3, 4, 64)
    y = torch.empty(7, 64)
    kernels.functions[(1,)](x, y, 64)
    expected = [x.exp2(), x.log2(), x.tanh(), x.tanh(), x.exp2(), x.clamp(min=0), torch.full((64,), 4.0)]
    for got, want in zip(y, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=3e-7, atol=3e-7, equal_nan=True)


def test_maxima_drop_nan_as_on_the_gpu() -> None:
    x = torch.linspace(-3, 4, 16)
    x[2:5] = torch.nan
    y = torch.empty(7, 16)
    kernels.functions[(1,)](x, y, 16)
    assert torch.equal(y[5, 2:5], torch.zeros(3))
    assert (y[6] == 4).all()
    kernels.functions[(1,)](torch.full((16,), torch.nan), y, 16)
    assert y[6].isnan().all()


@pytest.mark.parametrize("seed", [0, 12345, 2**40 + 17, -3])
def test_philox_of_triton_is_the_reference(seed: int) -> None:
    m, n, h, b = 9, 13, 5, 2
    words = torch.empty(m, n, dtype=torch.int64)
    kernels.philox[(1,)](seed, words, m, n, h, b, 16)
    q_idx, quad = np.meshgrid(np.arange(m), np.arange(4), indexing="ij")
    counter = (quad, q_idx, np.full_like(quad, h), np.full_like(quad, b))
    expected = np.stack(philox((seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), counter), axis=-1).reshape(m, 16)
    np.testing.assert_array_equal(words.numpy(), expected[:, :n].astype(np.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_descriptors_fill_with_zeros_and_clip_stores(dtype: torch.dtype) -> None:
    x = torch.full((40, 64), torch.nan, dtype=dtype)
    x[:37, :27] = torch.randn(37, 27, generator=torch.Generator().manual_seed(2)).to(dtype)
    y = torch.full((40, 48), 7.0, dtype=dtype)
    kernels.descriptor[(3,)](x[:37, :27], y[:37, :27], 37, 27, 64, 48, 16)
    assert torch.equal(y[:37, :27], x[:37, :27])
    assert (y[37:] == 7).all()
    assert (y[:, 27:] == 7).all()


def test_stray_addresses_name_the_tensor() -> None:
    x, y = torch.zeros(100), torch.empty(20)
    with pytest.raises(
        MemoryFault, match="load of 3 elements outside every tensor, the first at element 20 of 'x_ptr'"
    ):
        kernels.stray[(1,)](x[:20], y, 20, 3, 32)
    with pytest.raises(MemoryFault, match=r"load of 4 elements .* element -4 of 'x_ptr'"):
        kernels.stray[(1,)](x[40:60], y, 20, -4, 32)
    with pytest.raises(MemoryFault, match=r"store of 10 elements .* element 10 of 'y_ptr'"):
        kernels.stray[(1,)](x, y[:10], 20, 0, 32)


def test_stray_additions_name_the_tensor() -> None:
    """Where no other program has to see them in order, too."""
    x, y = torch.ones(20), torch.zeros(20)
    kernels.add[(2,)](x, y, 20, 32)
    assert (y == 2).all()
    with pytest.raises(MemoryFault, match=r"atomic of 10 elements .* element 10 of 'y_ptr'"):
        kernels.add[(1,)](x, y[:10], 20, 32)


def test_gaps_between_rows_are_not_the_tensor() -> None:
    x = torch.zeros(8, 4)[:, :2]
    with pytest.raises(
        MemoryFault, match="load of 8 elements outside every tensor, the first at element 2 of 'x_ptr'"
    ):
        kernels.stray[(1,)](x, torch.empty(16), 16, 0, 16)


def test_masked_loads_need_other() -> None:
    x, y = torch.zeros(16), torch.zeros(16)
    kernels.without_other[(1,)](x, y, 16, 16)
    with pytest.raises(MemoryFault, match="without other="):
        kernels.without_other[(1,)](x, y, 15, 16)


def test_inputs_are_read_only_and_programs_do_not_race() -> None:
    x, y = torch.ones(20), torch.empty(20)
    with pytest.raises(MemoryFault, match="two programs store to the same element of 'y_ptr'"):
        kernels.stray[(2,)](x, y, 20, 0, 32)
    kernels.scale_in_place[(2,)](x, 20, 16)
    assert (x == 2).all()
    with guarding(x), pytest.raises(MemoryFault, match="store to 'x_ptr', which is an input"):
        kernels.scale_in_place[(2,)](x, 20, 16)
    with guarding(enabled=False):
        kernels.stray[(2,)](x[:10], y, 20, 0, 32)


def test_empty_tensors_have_no_elements() -> None:
    with pytest.raises(MemoryFault, match="outside every tensor"):
        kernels.stray[(1,)](torch.empty(0), torch.empty(16), 16, 0, 16)


def test_a_machine_without_triton_is_told_what_to_install() -> None:
    """In a process of its own, whose Triton cannot be found."""
    program = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from attnc.verify.interpreter import ensure_interpreter\n"
        "try:\n"
        "    ensure_interpreter()\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name, error)\n"
    )
    ran = run_program(program, check=True)
    assert ran.stdout.startswith("triton")
    assert "kernels for Triton run in its interpreter" in ran.stdout
    assert "pip install triton" in ran.stdout


def test_lanes_of_a_mask_are_an_array() -> None:
    """An array has an attribute `data`, too, which is its bytes and no array."""
    mask = np.array([True, False])
    assert lanes(mask) is mask
    assert lanes(SimpleNamespace(data=mask)) is mask
