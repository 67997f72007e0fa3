"""vLLM: its attention function, and a plug-in with an attention backend.

    from attnc.adapters.vllm import unified_attention        # vLLM's argument list; vLLM is not imported
    vllm serve MODEL --attention-backend CUSTOM              # the plug-in, where attnc is installed

`plugin.register` is what vLLM calls in each of its processes; it names `backend.AttncBackend`, the only
module here that imports vLLM.
"""

from attnc.adapters.vllm.unified import unified_attention

__all__ = ["unified_attention"]
