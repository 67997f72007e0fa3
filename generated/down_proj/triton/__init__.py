"""down_proj for triton: calls the module made for it.

Made from specs/llama_7b.attn; `attnc compile specs/llama_7b.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
down_proj = default.down_proj
