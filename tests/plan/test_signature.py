"""Arguments of a callable: which inputs come by descriptors."""

from dataclasses import replace

import pytest

from attnc.expr.nodes import Const, Dim
from attnc.model.dtypes import DType
from attnc.plan.signature import feature, has_descriptors
from tests.plan.wide_attention import variant


@pytest.mark.parametrize(("d", "dtype"), [(64, DType.F32), (128, DType.F32), (256, DType.BF16)])
def test_tiles_of_f32_come_by_pointers(d: int, dtype: DType) -> None:
    assert has_descriptors(variant(d, dtype=dtype).attention) == (dtype is DType.BF16)


def test_columns_are_a_constant() -> None:
    q = variant(64).attention.q
    assert feature(q) == 64
    for size in (Dim("D"), Const(64.0)):
        with pytest.raises(ValueError, match=r"^the feature axis of q is not a constant"):
            feature(replace(q, shape=(*q.shape[:-1], size)))
