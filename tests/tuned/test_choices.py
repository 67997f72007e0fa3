"""Tuned choices: the file, and what of it a module embeds."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnc.build import compile_program, front
from attnc.diagnostics import DiagnosticError
from attnc.plan import ir
from attnc.plan.layout import KernelName
from attnc.source import Source
from attnc.target.files import render_files
from attnc.tuned.choices import TunedChoice, dump_tuned, knobs_of_kernel, load_tuned, tuned_choices
from tests.plans import module_of

SPEC = Path(__file__).parent.parent.parent / "specs" / "causal_gqa.attn"
H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def module() -> ir.Module:
    return module_of(SPEC)


def choice(
    module: ir.Module, position: int, kv_len: int | None, *, toolchain: str = "triton 3.6.0"
) -> TunedChoice:
    return TunedChoice(
        target=module.target,
        attention=module.variant.attention.name,
        variant=module.variant.name,
        device=H200,
        toolchain=toolchain,
        kv_len=kv_len,
        config=module.kernel.configs[position].texts(),
        microseconds=12.345,
    )


def source(*choices: TunedChoice) -> Source:
    return Source("tuned.json", dump_tuned(choices))


def test_choices_survive_the_file(module: ir.Module) -> None:
    choices = (choice(module, 2, 1024), choice(module, 0, None))
    loaded = load_tuned(source(*choices))
    assert [c.key for c in loaded] == [c.key for c in choices]
    assert loaded[0].config == choices[0].config
    assert loaded[0].microseconds == pytest.approx(12.345, abs=0.01)


def test_a_newer_measurement_replaces_the_older(module: ir.Module) -> None:
    (kept,) = load_tuned(source(choice(module, 2, 1024), choice(module, 5, 1024)))
    assert kept.config == module.kernel.configs[5].texts()


def test_the_file_does_not_depend_on_the_order(module: ir.Module) -> None:
    a, b = choice(module, 1, 1024), choice(module, 2, None)
    assert dump_tuned([a, b]) == dump_tuned([b, a])


def test_what_a_module_embeds(module: ir.Module) -> None:
    choices = [choice(module, 3, 4096), choice(module, 2, 1024), choice(module, 1, None)]
    assert tuned_choices(module, choices)["forward"] == {H200: ((1024, 2), (4096, 3), (None, 1))}


def test_lengths_beyond_what_was_measured_take_the_longest(module: ir.Module) -> None:
    assert tuned_choices(module, [choice(module, 2, 1024)])["forward"] == {H200: ((None, 2),)}


def test_the_newest_toolchain_speaks(module: ir.Module) -> None:
    old, new = (
        choice(module, 0, None, toolchain="triton 3.9.1"),
        choice(module, 1, None, toolchain="triton 3.10.0"),
    )
    assert tuned_choices(module, [new, old])["forward"] == {H200: ((None, 1),)}


def test_a_choice_that_the_spec_no_longer_offers_is_dropped(module: ir.Module) -> None:
    gone = replace(choice(module, 0, None), config={"tile.q": "1024"})
    other = replace(choice(module, 0, None), variant="another")
    assert not any(tuned_choices(module, [gone, other]).values())


def backward_choice(module: ir.Module, kernel: KernelName, position: int, kv_len: int | None) -> TunedChoice:
    knobs = knobs_of_kernel(kernel, module.backward_kernels[kernel].configs[position])
    return replace(choice(module, 0, kv_len), kernel=kernel, config=knobs)


def test_each_kernel_of_the_backward_has_its_own_choices(module: ir.Module) -> None:
    choices = [backward_choice(module, "dq", 2, 1024), backward_choice(module, "dkdv", 1, None)]
    loaded = load_tuned(source(choice(module, 3, None), *choices))
    assert [c.key for c in loaded] == sorted(c.key for c in [choice(module, 3, None), *choices])
    assert tuned_choices(module, loaded) == {
        "forward": {H200: ((None, 3),)},
        "dq": {H200: ((None, 2),)},
        "dkdv": {H200: ((None, 1),)},
    }
    (text,) = render_files(module, path="x", sha256="y", tuned=tuned_choices(module, loaded)).values()
    assert '"dkdv": {"NVIDIA H200": ((None, 1),)},' in text


def test_the_generated_text_holds_the_choices(module: ir.Module) -> None:
    compiled = compile_program(front(SPEC), "causal_gqa.attn", source(choice(module, 2, None)))
    text = next(o.text for o in compiled.outputs if o.path.endswith(f"triton/{module.variant.name}.py"))
    assert '{"NVIDIA H200": ((None, 2),)}' in text


@given(st.text() | st.from_regex(r'\{"format": [01], "choices": .{0,40}\}', fullmatch=True))
def test_a_file_that_is_none_is_a_diagnostic(text: str) -> None:
    source = Source("tuned.json", text)
    try:
        load_tuned(source)
    except DiagnosticError as failure:
        codes = [d.code for d in failure.diagnostics]
    else:
        codes = ["E0603"]
    assert codes == ["E0603"]
