"""ir.Module -> the two files of a CUDA kernel: the `.cu` text, and the Python module beside it that
launches it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import TypeAlias

import jinja2

from attnc.plan.decode import has_fixed_splits
from attnc.plan.ir import Decode, Module, split_of
from attnc.plan.sm80 import layout_of
from attnc.target.call_signature import Signature
from attnc.target.declaration import CallText, operator_name, print_value, tuning
from attnc.target.header import GLOSSARIES, delta_of, forward_numbers, generalize_element, header
from attnc.target.quote import without_comments
from attnc.target.sm80.arguments import ArgumentText
from attnc.target.sm80.backward import AddText, CudaBackwardText, CudaFileText, FinishText, RowsText
from attnc.target.sm80.declaration import CudaBackward, cuda_declaration
from attnc.target.sm80.epilogue import CudaEpilogueText
from attnc.target.sm80.kernel import CudaDecodeText, CudaText
from attnc.target.sm80.lists import LIST_THREADS, CudaListsText
from attnc.target.sm80.printer import at_row, local, scalar, sizes_of_call
from attnc.target.sm80.tidy import tidy_cuda
from attnc.target.support import imports, with_headers
from attnc.target.templates import ValueLines, python_environment, template_environment, tidy
from attnc.tuned.choices import NOT_TUNED, Tuned


def render_cuda(
    module: Module,
    *,
    path: str,
    sha256: str,
    tuned: Tuned = NOT_TUNED,
) -> dict[str, str]:
    """Returns the Python module, the `.cu` file that it reads from beside it, and those of the kernels that
    make gradients. Arguments as for `files.render_files`.
    """
    kernel = module.kernel
    text: CudaText
    if isinstance(kernel, Decode):
        text = CudaDecodeText(module, kernel, layout_of(kernel))
    else:
        text = CudaText(module, kernel, layout_of(kernel))
    fields = partial(_header, path=path, sha256=sha256)
    page = kernel_page(module, fields)
    common = {"module": module, "kernel": kernel, "text": text, "header": page}
    environment = cuda_environment()
    body = environment.get_template(f"cuda/{kernel.structure}.cu.jinja").render(common)
    source = environment.get_template("cuda/module.cu.jinja").render(
        common,
        numbers=tuple(forward_numbers(module)),
        body=body,
    )
    source = tidy_cuda(source)
    back, files = render_backward(module.differentiated, page)
    operator = operator_of(module, source, files)
    declaration = cuda_declaration(module, kernel, text, back, operator)
    host = render_host(module, fields(module), source, files, declaration, tuned, back)
    return {f"{module.variant.name}.py": host, f"{module.variant.kernels}.cu": source, **files}


def operator_of(module: Module, source: str, files: Mapping[str, str]) -> str:
    """Returns what torch knows a callable by that has these kernels."""
    return operator_name(module, without_comments("".join((source, *files.values())), "//"))


def render_host(
    module: Module,
    fields: Mapping[str, object],
    source: str,
    files: Mapping[str, str],
    declaration: CallText,
    tuned: Tuned,
    back: CudaBackward | None,
    *,
    target: str = "cuda",
    constants: str = "cuda/_host_constants.py.jinja",
) -> str:
    """Returns the Python module beside a `.cu` text and those of the backward. fields: of its header; target:
    as in the imports of the support package; constants: the template of its configs.
    """
    kernel = module.kernel
    hashes = {"kernel_sha256": _sha256((source,))}
    if back is not None:
        hashes["backward_sha256"] = _sha256(files.values())
    call = Signature(module)
    host = (
        python_environment()
        .get_template("cuda/host.py.jinja")
        .render(
            header={**fields, **hashes, "source": f"{module.variant.kernels}.cu"},
            constants=constants,
            splits=split_of(kernel) is not None,
            fixed_split=isinstance(kernel, Decode) and has_fixed_splits(kernel),
            back=back,
            call=call,
            declaration=print_value(declaration, "CALL = "),
            imports=imports(declaration.classes | call.called, target),
            tuning=tuning(module, tuned),
            more_fields=list_fields(module, back),
        )
    )
    return tidy(host)


def list_fields(module: Module, back: CudaBackward | None) -> list[str]:
    """Returns the fields of a config that only some modules have, as `name: type`. A field that only some
    kernels of the module use is 0 by default.
    """
    kernel = module.kernel
    names = [] if kernel.layout is None else list(kernel.layout.chosen(kernel.configs[0]))
    if split_of(kernel) is not None:
        names.append("splits")
    if isinstance(kernel, Decode) and has_fixed_splits(kernel):
        names.append("split_size")
    if back is None:
        return [f"{name}: int" for name in names]
    of_backward = {
        "maxnreg": back.limits_registers,
        "parts": back.cuts_walks,
        "spans": back.spans_keys,
        "kept": back.in_rounds is not None,
    }
    return [f"{name}: int = 0" for name in (*names, *(x for x, exists in of_backward.items() if exists))]


def _sha256(sources: Iterable[str]) -> str:
    return hashlib.sha256("".join(map(with_headers, sources)).encode()).hexdigest()


def render_backward(module: Module, page: Mapping[str, object]) -> tuple[CudaBackward | None, dict[str, str]]:
    """Returns the text of the function that launches the backward, and its kernels' files by name; nothing
    without gradients.
    """
    backward = module.backward
    if backward is None:
        return None, {}
    arguments = ArgumentText(module)
    sources = list_row_sources(module, arguments, RowsText)
    for planned in backward.kernels:
        text = CudaBackwardText(module, arguments, planned)
        sources.append((f"cuda/{planned.structure}", FRAME, text))
    if arguments.parts:
        sources.append(("cuda/backward_add", FRAME, AddText(module, arguments)))
    if arguments.adds_dq:
        sources.append(("cuda/backward_finish", FRAME, FinishText(module, arguments)))
    names, files = write_sources(module, sources, page)
    lists, of_lists = write_lists(module, arguments, page, "sm80")
    return CudaBackward(module, arguments, names, lists), {**of_lists, **files}


def write_lists(
    module: Module, arguments: ArgumentText, page: Mapping[str, object], machine: str
) -> tuple[CudaListsText | None, dict[str, str]]:
    """Returns the kernel that comes first in a backward which walks over lists, and its file; nothing without
    lists. machine: the header of device functions.
    """
    if module.lists is None:
        return None, {}
    threads = "THREADS" if machine == "sm80" else str(LIST_THREADS)  # which the header of sm_80 counts
    lists = CudaListsText(module, module.lists, arguments.dtypes, inverts=True, threads=threads)
    title = str(page["title"]).split(": forward,")[0]
    header = {**page, "title": f"{title}: backward, lists of blocks as bits."}
    template = cuda_environment().get_template("cuda/lists.cu.jinja")
    source = tidy_cuda(template.render(header=header, lists=lists, machine=machine))
    return lists, {file_of(module, lists.name): source}


#: The templates of a kernel and of its file, and what they print.
Source: TypeAlias = tuple[str, str, CudaFileText]
#: The template of most files.
FRAME = "cuda/backward_module"


def list_row_sources(module: Module, arguments: ArgumentText, preprocess: type[RowsText]) -> list[Source]:
    """Lists the kernels that come before those of gradients: of the epilogue, and of rows."""
    backward, sources = module.backward, list[Source]()
    assert backward is not None
    if backward.epilogue is not None:
        text = CudaEpilogueText(module, arguments, backward.epilogue)
        sources.append(("cuda/backward_epilogue", FRAME, text))
    if backward.preprocess is not None:
        rows = preprocess(module, arguments, backward.preprocess)
        sources.append(("cuda/backward_preprocess", FRAME, rows))
    return sources


def write_sources(
    module: Module, sources: Iterable[Source], page: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the files of kernels by the kernels' names, and the texts of these files."""
    names = {text.name: file_of(module, text.name) for _, _, text in sources}
    texts = {
        names[text.name]: backward_source(template, text, page, frame) for template, frame, text in sources
    }
    return names, texts


def file_of(module: Module, kernel: str) -> str:
    """Returns the file of a kernel of the backward, by the kernel's name: `support.cuda_call` finds it by
    that.
    """
    return f"{module.variant.kernels}_{kernel.removeprefix(f'{module.variant.attention.name}_')}.cu"


def backward_source(template: str, text: CudaFileText, page: Mapping[str, object], frame: str) -> str:
    """Returns a kernel's file, from the template of the kernel and that of all that is around it."""
    environment = cuda_environment()
    kernel = text.kernel if isinstance(text, CudaBackwardText) else text.module.kernel
    chain = text.chain if isinstance(text, CudaBackwardText) else None
    common = {"module": text.module, "kernel": kernel, "chain": chain, "text": text}
    body = environment.get_template(f"{template}.cu.jinja").render(common)
    title = str(page["title"]).split(": forward,")[0]
    header = {**page, "title": f"{title}: backward, {_TASKS[template.split('/')[1]]}."}
    module = environment.get_template(f"{frame}.cu.jinja")
    return tidy_cuda(module.render(common, header=header, body=body))


_TASKS = {
    "backward_epilogue": "through the epilogue",
    "backward_preprocess": "what the other kernels need of each row",
    "backward_dq": "a block of threads per q tile",
    "backward_dq_kept": "dq of ds that is kept, a block of threads per q tile",
    "backward_dkdv": "a block of threads per kv tile",
    "backward_dkdv_wide": "a block of threads per kv tile",
    "backward_latent_dk": "a block of threads per kv tile",
    "backward_latent_dq": "a block of threads per q tile",
    "backward_add": "sums of query heads added",
    "backward_finish": "dq rounded",
    "backward_join": "the sums of parts added",
}


@cache
def cuda_environment() -> jinja2.Environment:
    """Returns the environment of templates of CUDA C++."""
    environment = template_environment("[[", "]]")  # C++ has braces of its own
    environment.add_extension(ValueLines)
    environment.filters["comment"] = join_comments
    environment.globals.update(local=local, scalar=scalar, at_row=at_row, sizes_of_call=sizes_of_call)
    return environment


def join_comments(lines: Iterable[str], indent: str = "") -> str:
    """Returns lines as a comment of C++."""
    return "\n".join(f"// {indent}{line}" for line in lines)


def kernel_page(module: Module, fields: Callable[[Module], dict[str, object]]) -> dict[str, object]:
    """Returns the fields of the header of kernels. fields: those that a module shows with them."""
    is_shared = module.variant.element_param != ""
    passes = "the modules beside this file pass" if is_shared else f"{module.variant.name}.py passes"
    glossary = GLOSSARIES[module.variant.attention.softmax.form].splitlines()
    own = {"glossary": glossary, "passes": passes, "delta": delta_of(module, "do o")}
    return {**fields(generalize_element(module)), **own}


def _header(module: Module, path: str, sha256: str) -> dict[str, object]:
    kernel = module.kernel
    split = "split-K" if layout_of(kernel).warp_split == "kv" else "split-Q"
    return header(module, f"{module.target} and newer", f", {split} between warps", path, sha256)
