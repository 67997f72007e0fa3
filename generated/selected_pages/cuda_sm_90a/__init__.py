"""selected_pages for cuda.sm_90a: calls the module made for it.

Made from specs/selected_pages.attn; `attnc compile specs/selected_pages.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
selected_pages = default.selected_pages
