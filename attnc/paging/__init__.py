"""Keys and values of many sequences in pages of fixed size, for kernels of specs with `via paged(...)`:
allocate, append, fork, copy on write, truncate, keep, free (PagedAttention; Kwon et al. 2023, arXiv
2309.06180, sections 4.2 to 4.4). `DraftTrees` are trees of drafted tokens, as kernels read them.

The lists of pages and their numbers of sharers live on the host, which alone decides; the block table and the
lengths that kernels read live on the device and are only ever written to. A step costs one small copy to the
device and never waits for it. A call happens whole or not at all.
"""

from attnc.paging.allocator import CacheFull, OutOfPages, OutOfRows, Statistics
from attnc.paging.cache import Layout, PagedCache, Step
from attnc.paging.spread import Spread
from attnc.paging.trees import DraftTrees, pack_bits

__all__ = [
    "CacheFull",
    "DraftTrees",
    "Layout",
    "OutOfPages",
    "OutOfRows",
    "PagedCache",
    "Spread",
    "Statistics",
    "Step",
    "pack_bits",
]
