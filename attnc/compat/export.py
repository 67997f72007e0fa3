"""A folder of kernels that programs load without attnc: `attnc export --hf-kernel`.

The layout is that of the package `kernels` of Hugging Face. Python files are those of `attnc.compat`, with
imports among themselves; the place of the compiler is taken by modules made beforehand, one for each form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import attnc
from attnc.api import fastest, repeats, tensors
from attnc.compat.exported import module_name
from attnc.compat.form import Form
from attnc.diagnostics import shown
from attnc.runtime import locks
from attnc.target.support import FOLDER, beside, support_files

DTYPES = {"f16": "float16", "bf16": "bfloat16"}
_COPIED = ("blocks", "call", "flash_attn", "form", "kvcache", "rotary")
_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")


def forms(dtypes: Iterable[str], sizes: Iterable[int]) -> Iterator[Form]:
    """Yields the forms of attention that models of transformers call: causal or not, windows, and one of
    scale, softcap and sinks; dense and packed, forward and gradients, and one token against these and against
    pages of 256. dtypes: "f16", "bf16"; sizes: head dimensions.
    """
    extras = ((), ("scaled",), ("softcap",), ("sink",))
    for dtype, size, extra, causal, window in product(dtypes, sizes, extras, (True, False), (False, True)):
        trained = ("q", "k", "v", *(["s_aux"] if "sink" in extra else []))
        form = Form(
            dtype=DTYPES[dtype],
            size=size,
            size_v=size,
            causal=causal,
            left=window,
            right=window and not causal,
            **dict.fromkeys(extra, True),  # type: ignore[arg-type]  # fields that are flags
        )
        yield form
        yield replace(form, splits=0)
        yield replace(form, grads=trained)
        packed = replace(form, q="ragged", kv="ragged")
        yield packed
        yield replace(packed, splits=0)
        yield replace(packed, grads=trained)
        yield replace(form, kv="paged", page=256, lengths="cache_seqlens", splits=0)


def python_files() -> dict[str, str]:
    folder = Path(__file__).parent
    texts = {f"{name}.py": (folder / f"{name}.py").read_text(encoding="utf-8") for name in _COPIED}
    texts["compiled.py"] = (folder / "exported.py").read_text(encoding="utf-8")
    for module in (fastest, locks, repeats, shown, tensors):
        path = Path(str(module.__file__))
        texts[path.name] = path.read_text(encoding="utf-8")
    moved = {
        r"attnc\.compat\.": ".",
        r"attnc\.api\.": ".",
        r"attnc\.diagnostics\.": ".",
        r"attnc\.runtime\.": ".",
        r"attnc\.support\.": f".kernels.{FOLDER}.",
    }
    own = {}
    for name, text in texts.items():
        for there, here in moved.items():
            text = re.sub(rf"\bfrom {there}(\w+) import", rf"from {here}\1 import", text)
        own[name] = text
    names = ", ".join(_FUNCTIONS)
    listed = ", ".join(f'"{name}"' for name in _FUNCTIONS)
    own["__init__.py"] = (
        f'"""flash-attention\'s functions on kernels that attnc {attnc.__version__} made."""\n\n'
        f"from .flash_attn import {names}\n\n__all__ = [{listed}]\n"
    )
    own["kernels/__init__.py"] = '"""A module for each form of a call, written by attnc."""\n'
    return {**own, **{f"kernels/{path}": text for path, text in support_files().items()}}


def kernel_files(form: Form) -> dict[str, str]:
    """Returns the texts of a form's modules, by path: that for Triton, and a folder for Hopper where that has
    kernels for it, which are its fastest: for gradients also one whose sums have any order.
    """
    from attnc.api.compile import SpecError, compile_family

    made = partial(compile_family, form.text, warn=False, splits=form.splits)
    family = made(target=fastest.TRITON)
    files = {f"kernels/{module_name(form)}.py": beside(family.files["default.py"])}
    ways = (False, True) if form.grads and form.q == "dense" else (False,)
    for fast in ways:
        try:
            family = made(target=fastest.HOPPER, deterministic=not fast)
        except SpecError:
            break
        folder = f"kernels/{module_name(form, fastest.HOPPER, fast=fast)}"
        files |= {
            f"{folder}/{name}": text.replace(f"from ...{FOLDER}", f"from ..{FOLDER}")
            for name, text in family.files.items()
        }
        files[f"{folder}/__init__.py"] = '"""Kernels for Hopper GPUs, which CuPy launches."""\n'
    return files


def metadata(name: str, texts: Iterable[str]) -> str:
    """Returns the metadata of a folder, for the package `kernels`."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    facts = {
        "id": f"_{name}_{digest}",
        "name": name,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    return json.dumps(facts, indent=2) + "\n"
