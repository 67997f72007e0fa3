"""What is left of attnc when a process ends: no thread, and nothing that ends it otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Every way into attnc that makes kernels, with gradients; and a tensor that is made on a thread of its own.
SCRIPT = """
import atexit, os, threading
os.environ["TRITON_INTERPRET"] = "1"
atexit.register(lambda: print("threads:", [one.name for one in threading.enumerate()]))
import torch
import attnc
from attnc.compat.flash_attn import flash_attn_func
from attnc.flex import flex_attention
from attnc.support import memory

family = attnc.compile('''
attention left {
  input q: f32[B, M, H, 16]
  input k, v: f32[B, N, H, 16]
  score = dot(q, k)
  normalize = softmax
  output o: f32[B, M, H, 16]
  grad q, k, v
}
''', target="triton")
q, k, v = (torch.randn(1, 2, 16, 16, requires_grad=True) for _ in range(3))
for attend in (family, flash_attn_func, flex_attention):
    for _ in range(2):
        attend(q, k, v).sum().backward()
torch.cuda.current_stream = lambda device: type("Stream", (), {"synchronize": lambda self: None})()
memory.made_apart(lambda: torch.zeros(1))
"""


@pytest.mark.slow
def test_no_thread_outlives_the_last_line() -> None:
    """A thread that asks for the interpreter while it ends aborts the process: attnc's have ended before."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "threads: ['MainThread']\n"), done.stderr
