"""ir.Module -> the two files of a Hopper kernel: the `.cu` text, and the Python module that launches it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from attnc.plan.ir import Decode, Module
from attnc.plan.sm90 import decode_layout_of, layout_of
from attnc.plan.sm90.backward import Sm90Backward
from attnc.target.header import forward_numbers, header
from attnc.target.sm80.backward import CudaBackwardText
from attnc.target.sm80.declaration import CudaBackward
from attnc.target.sm80.render import (
    FRAME,
    cuda_environment,
    kernel_page,
    list_row_sources,
    operator_of,
    render_backward,
    render_host,
    write_lists,
    write_sources,
)
from attnc.target.sm80.tidy import tidy_cuda
from attnc.target.sm90.backward import Sm90FinishText, Sm90JoinText, Sm90PreprocessText
from attnc.target.sm90.backward_tiles import Sm90Arguments, Sm90BackwardText, template_of
from attnc.target.sm90.declaration import HopperBackward, hopper_declaration
from attnc.target.sm90.decode import Sm90DecodeText
from attnc.target.sm90.kernel import Sm90Text
from attnc.tuned.choices import NOT_TUNED, Tuned

_NAMES = {"forward_q_kv": "module", "decode": "decode_module", "decode_warps": "warps_module"}
_FRAMES = {body: f"sm90/{name}.cu.jinja" for body, name in _NAMES.items()}


def render_sm90(module: Module, *, path: str, sha256: str, tuned: Tuned = NOT_TUNED) -> dict[str, str]:
    """Returns the texts of one variant. Arguments as for `files.render_files`."""
    kernel = module.kernel
    text: Sm90Text | Sm90DecodeText
    if isinstance(kernel, Decode):
        text = Sm90DecodeText(module, kernel, decode_layout_of(kernel))
    else:
        text = Sm90Text(module, kernel, layout_of(kernel))
    fields = partial(header, target=module.target, what=", TMA and wgmma", path=path, sha256=sha256)
    page = kernel_page(module, fields)
    common = {"module": module, "kernel": kernel, "text": text, "header": page}
    environment = cuda_environment()
    body = environment.get_template(f"sm90/{text.body}.cu.jinja").render(common)
    numbers, frame = tuple(forward_numbers(module)), environment.get_template(_FRAMES[text.body])
    source = frame.render(common, numbers=numbers, body=body)
    source = tidy_cuda(source)
    back, files = _backward(module.differentiated, page)
    operator = operator_of(module, source, files)
    declaration = hopper_declaration(module, kernel, text, back, operator)
    constants = f"{'cuda' if kernel.structure == 'decode' else 'sm90'}/_host_constants.py.jinja"
    host = render_host(
        module, fields(module), source, files, declaration, tuned, back, target="hopper", constants=constants
    )
    return {f"{module.variant.name}.py": host, f"{module.variant.kernels}.cu": source, **files}


def _backward(module: Module, page: Mapping[str, object]) -> tuple[CudaBackward | None, dict[str, str]]:
    backward = module.backward
    if backward is None or not isinstance(backward.layout, Sm90Backward):
        return render_backward(module, page)
    arguments = Sm90Arguments(module)
    sources = list_row_sources(module, arguments, Sm90PreprocessText)
    for planned in backward.all_kernels:
        if planned.kind not in backward.layout.by_wgmma:
            text = CudaBackwardText(module, arguments, planned)
            sources.append((f"cuda/{planned.structure}", FRAME, text))
            continue
        made = Sm90BackwardText(module, arguments, planned)
        sources.append((*template_of(made), made))
    if arguments.summed:
        sources.append(("sm90/backward_join", FRAME, Sm90JoinText(module, arguments)))
    if arguments.adds_dq:
        sources.append(("sm90/backward_finish", FRAME, Sm90FinishText(module, arguments)))
    names, files = write_sources(module, sources, page)
    lists, of_lists = write_lists(module, arguments, page, "sm90")
    return HopperBackward(module, arguments, names, lists), {**of_lists, **files}
