"""Arguments of a callable: which inputs come by descriptors."""

import pytest

from attnc.model.dtypes import DType
from attnc.plan.signature import has_descriptors
from tests.plan.wide_attention import variant


@pytest.mark.parametrize(("d", "dtype"), [(64, DType.F32), (128, DType.F32), (256, DType.BF16)])
def test_wide_tiles_of_f32_come_by_pointers(d: int, dtype: DType) -> None:
    assert has_descriptors(variant(d, dtype=dtype).attention) == (dtype is DType.BF16 or d == 64)
