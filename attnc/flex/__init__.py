"""FlexAttention's programs as specs: the same functions, traced into the language and compiled."""
