"""selected_block_pages for cuda.sm_90a: calls the module made for it.

Made from specs/selected_block_pages.attn; `attnc compile specs/selected_block_pages.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_block_pages = default.selected_block_pages
