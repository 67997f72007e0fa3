"""Drop-in functions for serving engines and model libraries.

An adapter writes the spec that its arguments mean and compiles it, once for each combination of what the
text depends on (dtype, head dimension, page size, scale, mask, softcap, sinks); lengths, tables and tensors
are read at every call. So no call gets a kernel that is only nearly right: what no spec can say is refused,
with an error that names the argument, what was expected and what came.

A module imports its library inside functions, or not at all where only a calling convention is followed; the
backends of vLLM and SGLang, which these import, are the exception.
"""
