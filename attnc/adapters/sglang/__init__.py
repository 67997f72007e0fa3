"""SGLang: a plug-in with an attention backend.

    python -m sglang.launch_server --model-path MODEL --attention-backend attnc    # with attnc installed

`plugin.register` is what SGLang calls in each of its processes; `backend`, which it names, is the only
module here that imports SGLang.
"""
