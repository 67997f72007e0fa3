"""The scalar language shared by masks, scores and tile bounds.

`nodes` holds the typed expression tree; `affine`, `interval` and `derive` transform it; `evaluate` gives it
meaning, element by element. Nothing here knows of tensors' layouts, of tiles or of targets.
"""
