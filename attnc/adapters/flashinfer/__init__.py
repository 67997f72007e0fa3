"""FlashInfer's wrappers of paged attention: `plan` takes the tables of a batch as CSR, `run` the tensors of a
layer. FlashInfer itself is not imported.

    from attnc.adapters.flashinfer import BatchDecodeWithPagedKVCacheWrapper

lse leaves in base 2, as FlashInfer's functions that merge states expect.
"""

from attnc.adapters.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.wrapper import dense_tables

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", "dense_tables"]
