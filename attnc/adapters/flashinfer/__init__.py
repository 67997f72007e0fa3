"""FlashInfer's wrappers and functions of attention: `plan` takes the tables of a batch, `run` the tensors of
a layer. FlashInfer itself is not imported.

    from attnc.adapters.flashinfer import BatchDecodeWithPagedKVCacheWrapper

Names, orders of arguments and modules (`decode`, `prefill`, `cascade`, `mla`, `page`) are FlashInfer's. lse
leaves in base 2, as its functions that merge states expect. Arguments that steer its own kernels (workspaces,
backends, launches) change no result and are taken; what cannot be done is refused by its name.
"""

from attnc.adapters.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from attnc.adapters.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from attnc.adapters.flashinfer.masks import packbits, segment_packbits
from attnc.adapters.flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from attnc.adapters.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from attnc.adapters.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from attnc.adapters.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MLAPlanMetadata",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
