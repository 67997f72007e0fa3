"""selected_chunks for cuda.sm_90a: calls the module made for it.

Made from specs/selected_chunks.attn; `attnc compile specs/selected_chunks.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_chunks = default.selected_chunks
