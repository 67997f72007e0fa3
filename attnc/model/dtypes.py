"""Element types: a row of facts for each, which everything else reads.

A new type is a row here, its name in `attnc/support/arguments.py`, and how kernels convert it; the table of
extensions in docs/architecture.md has the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of an element type.

    kind: "float" and "narrow" are numbers of q, k, v and o, narrow ones of k and v alone, in 8 bits, each of
    which f16 and bf16 hold exactly; bytes: of an element; torch, triton, cuda: its names in PyTorch, in
    Triton's signatures and in CUDA C++, "" where no kernel has it; elsewhere: what others call it.

    precision: bits of the significand, the leading one included, 0 for integers; least_exponent: of the
    smallest normal number; largest: finite number; least: integer, of a narrow type; has_infinity, has_nan:
    among its codes; capability: ten times the compute capability of the first devices for which Triton
    converts it, 0 for all; is_reserved: whether its name is a word of the language, which those of types that
    came later are not.
    """

    kind: Literal["float", "narrow", "other"]
    bytes: int
    torch: str
    triton: str
    cuda: str = ""
    elsewhere: str = ""
    precision: int = 0
    least_exponent: int = 0
    largest: float = 0.0
    least: float = 0.0
    has_infinity: bool = False
    has_nan: bool = False
    capability: int = 0
    is_reserved: bool = True


class DType(StrEnum):
    """Element types of the language; the value is its spelling in a spec."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    I32 = "i32"
    I64 = "i64"
    BOOL = "bool"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    I8 = "i8"
    U8 = "u8"

    @property
    def facts(self) -> Facts:
        return _FACTS[self]

    @property
    def is_float(self) -> bool:
        return self.facts.kind == "float"

    @property
    def is_narrow(self) -> bool:
        return self.facts.kind == "narrow"

    @property
    def is_narrow_integer(self) -> bool:
        return self.is_narrow and not self.facts.precision

    @property
    def bytes(self) -> int:
        return self.facts.bytes

    @property
    def largest(self) -> float:
        return self.facts.largest

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.facts.least_exponent

    @property
    def unit_roundoff(self) -> float:
        """u = half the distance from 1 to the next number; floats only."""
        return 2.0**-self._precision

    @property
    def smallest_subnormal(self) -> float:
        return self.smallest_normal * 2.0 ** (1 - self._precision)

    @property
    def _precision(self) -> int:
        if not self.facts.precision:
            raise ValueError(f"{self} is no float")
        return self.facts.precision


# fmt: off
_FACTS: Mapping[DType, Facts] = {
    DType.F16: Facts(
        kind="float", bytes=2, torch="float16", triton="fp16", cuda="f16",
        elsewhere="half float16 fp16",
        precision=11, least_exponent=-14, largest=65504.0, has_infinity=True, has_nan=True,
    ),
    DType.BF16: Facts(
        kind="float", bytes=2, torch="bfloat16", triton="bf16", cuda="bf16",
        elsewhere="bfloat16",
        precision=8, least_exponent=-126, largest=2.0**128 - 2.0**120, has_infinity=True, has_nan=True,
    ),
    DType.F32: Facts(
        kind="float", bytes=4, torch="float32", triton="fp32", cuda="float",
        elsewhere="float float32 fp32 single",
        precision=24, least_exponent=-126, largest=2.0**128 - 2.0**104, has_infinity=True, has_nan=True,
    ),
    DType.I32: Facts(
        kind="other", bytes=4, torch="int32", triton="i32", cuda="int",
        elsewhere="int int32 s32 u32",
    ),
    DType.I64: Facts(
        kind="other", bytes=8, torch="int64", triton="i64", cuda="long long",
        elsewhere="long int64 s64",
    ),
    DType.BOOL: Facts(
        kind="other", bytes=1, torch="bool", triton="i1", cuda="bool",
        elsewhere="bool_ boolean i1 b1",
    ),
    DType.E4M3: Facts(
        kind="narrow", bytes=1, torch="float8_e4m3fn", triton="fp8e4nv", cuda="e4m3",
        elsewhere="fp8 float8 f8 float8_e4m3fn float8_e4m3 fp8_e4m3 fp8e4nv f8e4m3 e4m3fn",
        precision=4, least_exponent=-6, largest=448.0, has_nan=True, capability=89, is_reserved=False,
    ),
    DType.E5M2: Facts(
        kind="narrow", bytes=1, torch="float8_e5m2", triton="fp8e5", cuda="e5m2",
        elsewhere="float8_e5m2 fp8_e5m2 fp8e5 f8e5m2",
        precision=3, least_exponent=-14, largest=57344.0, has_infinity=True, has_nan=True, is_reserved=False,
    ),
    DType.I8: Facts(
        kind="narrow", bytes=1, torch="int8", triton="i8", cuda="i8",
        elsewhere="int8 s8 char",
        largest=127.0, least=-128.0, is_reserved=False,
    ),
    DType.U8: Facts(
        kind="other", bytes=1, torch="uint8", triton="u8", cuda="unsigned char",
        elsewhere="uint8 uchar byte",
        is_reserved=False,
    ),
}
# fmt: on
