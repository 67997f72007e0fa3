"""odd_dims for cuda.sm_80: calls the module made for D, Dv.

Made from specs/odd_dims.attn; `attnc compile specs/odd_dims.attn` makes it again.
"""

from . import d80_dv96

VARIANTS = {
    (80, 96): d80_dv96.odd_dims,
}


def odd_dims(q, k, v, **options):
    """See the module of a variant for shapes and options. Raises ValueError where no variant was compiled."""
    try:
        key = (q.shape[3], v.shape[3])
    except (AttributeError, IndexError):  # not such a tensor: any variant says which, and what it expected
        key = next(iter(VARIANTS))
    if key not in VARIANTS:
        raise ValueError(f"odd_dims was not compiled for (D, Dv) = {key}; there is: {list(VARIANTS)}")
    return VARIANTS[key](q, k, v, **options)
