"""Plans for a reader: its loops and loads, its resources, its roofline, its error bound.

    ir.Module + Device --figures, backward--> explanations --text--> words, or a dictionary for programs

Nothing is decided here, nothing is run, and no GPU is needed.
"""
