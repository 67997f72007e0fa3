"""Keys and values of many sequences in pages of fixed size, for kernels of specs with `via paged(...)`:
allocate, append, fork, copy on write, truncate, free (PagedAttention; Kwon et al. 2023, arXiv 2309.06180,
sections 4.2 to 4.4).

The lists of pages and their numbers of sharers live on the host, which alone decides; the block table and the
lengths that kernels read live on the device and are only ever written to. A step costs one small copy to the
device and never waits for it.
"""

from attnc.paging.allocator import CacheFull, OutOfPages, OutOfRows, Statistics
from attnc.paging.cache import Layout, PagedCache, Spread, Step

__all__ = ["CacheFull", "Layout", "OutOfPages", "OutOfRows", "PagedCache", "Spread", "Statistics", "Step"]
