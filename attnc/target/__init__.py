"""From a plan to text: `printer` turns expressions into a target's syntax, `render` fills the target's
templates.

Nothing is decided here. A target is a subclass-free pair: an operator table for the printer and a folder of
templates.
"""
