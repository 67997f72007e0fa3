"""Which weights a kernel drops, by the reference."""

from __future__ import annotations

import numpy as np
import torch

from attnc.reference import keep


def keep_weights(p: float, seed: int, shape: torch.Size) -> torch.Tensor:
    """Returns which weights [B, H, M, N] dropout keeps."""
    rows, keys = np.arange(shape[2])[:, None], np.arange(shape[3])[None, :]
    found = [[keep(seed, b, h, rows, keys, p) for h in range(shape[1])] for b in range(shape[0])]
    return torch.from_numpy(np.array(found))
