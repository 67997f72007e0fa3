"""The positions of a task's rows as tensors: the inputs that derived specs have (`derive.TABLES`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from attnc.distributed.plan import Plan
from attnc.distributed.spans import Ints
from attnc.model.attention import Attention


def tables_of(
    plan: Plan, attention: Attention, rows: Ints, first_key: int, device: torch.device
) -> Mapping[str, torch.Tensor]:
    """Every table for these query rows, against keys from `first_key` on; `_rows` and `_places` are where
    views take their rows from.

    Raises ValueError for packed sequences with more queries than keys, whose rows are in no order.
    """
    sizes = plan.sizes
    numbers: dict[str, int] = {
        "key_first": first_key,
        "queries_all": sizes.queries,
        "keys_all": sizes.keys,
        "heads_all": sizes.heads,
        "kv_heads_all": sizes.kv_heads,
    }
    found: dict[str, Ints | int] = dict(numbers)
    if sizes.ends_q is None:
        places = rows if attention.lengths else rows + (sizes.keys - sizes.queries)
        found |= {"row_at": places - first_key, "_rows": rows, "_places": places}
    else:
        assert sizes.ends_k is not None, "keys are packed where queries are"
        b = np.searchsorted(sizes.ends_q, rows, "right") - 1
        queries, keys = np.diff(sizes.ends_q)[b], np.diff(sizes.ends_k)[b]
        if (queries > keys).any():
            raise ValueError("a packed sequence has more queries than keys, which ranks cannot share out")
        start = sizes.ends_k[b] - first_key
        place = start + (rows - sizes.ends_q[b]) + keys - queries
        found |= {
            "row_at": place,
            "seq_start": start,
            "seq_stop": start + keys,
            "seq_id": b,
            "seq_rows": queries,
        }
    return {
        name: torch.as_tensor(np.asarray(x), dtype=torch.int32, device=device) for name, x in found.items()
    }
