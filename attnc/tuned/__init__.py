"""What was measured once and is kept beside the specs: the config of each kernel, and tables of what to call.

    specs/tuned/NAME.json            --choices--> the config that a kernel takes on a device
    specs/tuned/NAME.dispatch.json   --tables-->  the implementation, or the schedule, for sizes

`attnc.tune.configs` writes these files; the compiler embeds what they say in the generated text.
"""
