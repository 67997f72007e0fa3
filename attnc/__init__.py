"""attnc: a compiler from short `.attn` specs to readable, verified attention kernels."""

__version__ = "0.1.0"
