"""window for triton: calls the module made for D.

Made from specs/window.attn; `attnc compile specs/window.attn` makes it again.
"""

from . import d128

VARIANTS = {
    (128,): d128.window,
}


def window(q, k, v, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    try:
        key = (q.shape[3],)
    except (AttributeError, IndexError):  # not such a tensor: any variant says which, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise ValueError(f"window was not compiled for (D) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, **options)
