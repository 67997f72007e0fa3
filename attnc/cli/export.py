"""`attnc export`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from attnc.cli.console import Mistake, count_noun, note, progress, say, split_commas
from attnc.cli.writing import FORCE, write_or_refuse
from attnc.diagnostics import did_you_mean
from attnc.output import MANIFEST, OutputFile, check_folder, write

#: Where the kernels package looks for what every version of torch loads.
_FOLDER = "build/torch-universal"


def export(
    hf_kernel: Annotated[
        Path,
        typer.Option("--hf-kernel", metavar="DIR", help="The folder to write, for Hugging Face's kernels."),
    ],
    name: Annotated[str, typer.Option(help="What the kernel is called there.")] = "attnc",
    sizes: Annotated[str, typer.Option(help="Head dimensions, comma separated.")] = "64,128",
    dtypes: Annotated[str, typer.Option(help="Types, comma separated: bf16, f16.")] = "bf16,f16",
    force: FORCE = False,
) -> None:
    """Write a folder of kernels that programs load without attnc, or bring one up to date.

    With flash-attention's functions, for what models of transformers call: causal or not, windows, and one of
    a scale of their own, softcap and sinks; dense and packed, forward and gradients, and one token against
    pages. Load it with kernels.get_local_kernel(DIR).

    Example: attnc export --hf-kernel attnc-kernels --sizes 64
    """
    from attnc.compat.export import DTYPES, forms, kernel_files, metadata, python_files

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise Mistake(f"{name!r} is no name of a package", "small letters, digits and underscores")
    for dtype in (wanted := split_commas(dtypes)):
        if dtype not in DTYPES:
            hint = "".join(did_you_mean(dtype, DTYPES)) or f"known are {', '.join(DTYPES)}"
            raise Mistake(f"there is no type '{dtype}' to export", hint)
    heads = split_commas(sizes)
    if not heads or not wanted or not all(size.isdecimal() and 1 <= int(size) <= 1024 for size in heads):
        raise Mistake(
            "--sizes and --dtypes are lists, such as 64,128 and bf16", "head dimensions are 1 to 1024"
        )
    if hf_kernel.exists() and not hf_kernel.is_dir():
        raise Mistake(f"'{hf_kernel}' is no folder", "choose another name")
    check_folder(hf_kernel / MANIFEST)
    texts = python_files()
    chosen = list(forms(wanted, map(int, heads)))
    with progress("export", len(chosen)) as bar:
        for form in chosen:
            bar.advance(f"d{form.size}")
            texts |= kernel_files(form)
    outputs = [OutputFile(path=f"{_FOLDER}/{name}/{file}", text=text) for file, text in texts.items()]
    outputs += [OutputFile(path=f"{_FOLDER}/metadata.json", text=metadata(name, texts.values()))]
    write_or_refuse(partial(write, outputs, hf_kernel, complete=True), hf_kernel, force=force)
    say(f"wrote kernels for {count_noun(len(chosen), 'form')} of a call to {hf_kernel / _FOLDER / name}")
    note(f"   = help: kernels.get_local_kernel(Path({str(hf_kernel)!r}))")
