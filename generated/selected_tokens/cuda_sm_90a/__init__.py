"""selected_tokens for cuda.sm_90a: calls the module made for it.

Made from specs/selected_tokens.attn; `attnc compile specs/selected_tokens.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_tokens = default.selected_tokens
