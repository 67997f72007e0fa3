"""FlashInfer's wrappers and functions of attention: `plan` takes the tables of a batch, `run` the tensors of
a layer. FlashInfer itself is not imported.

    from attnc.adapters.flashinfer import BatchDecodeWithPagedKVCacheWrapper

Names, orders of arguments and modules (`decode`, `prefill`, `cascade`, `sparse`, `pod`, `attention`, `mla`,
`page`) are FlashInfer's. lse leaves in base 2, as its functions that merge states expect. Arguments that
steer its own kernels (workspaces, backends, launches) change no result and are taken; what cannot be done is
refused by its name.
"""

from attnc.adapters.flashinfer.attention import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithAttentionSinkWrapper,
)
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
    fast_decode_plan,
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
from attnc.adapters.flashinfer.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from attnc.adapters.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from attnc.adapters.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from attnc.adapters.flashinfer.ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from attnc.adapters.flashinfer.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
    convert_bsr_mask_layout,
)

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MLAPlanMetadata",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "convert_bsr_mask_layout",
    "fast_decode_plan",
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
