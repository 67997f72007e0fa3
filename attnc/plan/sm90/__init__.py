"""The Hopper target: what each pass of a plan asks of `target`, and how it is decided."""

from attnc.plan.sm90.target import SM90A, backward_roles_of, decode_layout_of, layout_of, roles_of

__all__ = ["SM90A", "backward_roles_of", "decode_layout_of", "layout_of", "roles_of"]
