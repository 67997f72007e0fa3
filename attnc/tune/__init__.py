"""`attnc tune`: measures what is fastest here, and writes it beside the spec for `attnc.tuned` to read."""
