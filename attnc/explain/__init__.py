"""Plans for a reader: what is computed where, what it takes, how fast it could be, how wrong it may be.

    ir.Module + Device --figures, backward--> explanations --text--> words, or a dictionary for programs

Nothing is decided here, nothing is run, and no GPU is needed.
"""
