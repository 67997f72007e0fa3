"""unsorted_documents for triton: calls the module made for it.

Made from specs/unsorted_documents.attn; `attnc compile specs/unsorted_documents.attn` makes it again.
"""

from . import default

#: What the modules' CONFIGS hold.
Config = default.Config
unsorted_documents = default.unsorted_documents
