"""cross for cuda.sm_80: calls the module made for D, Dv.

Made from specs/cross.attn; `attnc compile specs/cross.attn` makes it again.
"""

from . import d64_dv128

VARIANTS = {
    (64, 128): d64_dv128.cross,
}


def cross(q, k, v, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    try:
        key = (q.shape[3], v.shape[3])
    except (AttributeError, IndexError):  # not such a tensor: any variant says which, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise ValueError(f"cross was not compiled for (D, Dv) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, **options)
