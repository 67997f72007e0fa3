"""These tests run Triton's interpreter, which has to be chosen before triton is first imported."""

from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()
