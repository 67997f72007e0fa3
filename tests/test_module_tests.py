"""Every module of five packages has a test file of its name: `attnc/plan/sm90/roles.py` is tested in
`tests/plan/test_sm90_roles.py`. Those that have none are listed, with the file that tests them.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("expr", "model", "plan", "target", "support")

#: Modules without a file of their own, and where they are tested: most print parts of kernels, and are judged
#: by what the kernels compute.
TESTED_ELSEWHERE = {
    "model/normalization": "test_diagnostics",
    "model/program": "model/test_resolve_projection",
    "plan/gradients": "plan/test_ir_backward",
    "plan/ir/bound": "plan/test_error_bound",
    "plan/ir/kernel": "plan/test_ir_text",
    "plan/ir/list_making": "plan/test_ir_lists",
    "plan/ir/module": "plan/test_ir_text",
    "plan/layout": "plan/test_sm80_layout",
    "plan/lower": "plan/test_ir_text",
    "plan/sm90/backward_configs": "plan/test_sm90_backward",
    "plan/sm90/backward_work": "target/test_sm90_backward",
    "plan/sm90/decode_layout": "plan/test_sm90_decode",
    "target/call_signature": "target/test_names",
    "target/declaration": "target/test_quote",
    "target/kernel_view": "target/test_template_needs",
    "target/projection": "kernels/test_projection",
    "target/sm80/arguments": "runtime/test_cuda_launches",
    "target/sm80/backward": "kernels/test_cuda_packed_gradients",
    "target/sm80/declaration": "runtime/test_cuda_launches",
    "target/sm80/kernel": "kernels/test_cuda_storage",
    "target/sm80/launches": "runtime/test_cuda_launches",
    "target/sm80/render": "runtime/test_nvrtc",
    "target/sm90/render": "runtime/test_nvrtc",
    "target/sm90/score": "kernels/test_sm90",
    "target/sm90/tiles": "kernels/test_sm90_pages",
    "target/triton/backward": "kernels/test_backward",
    "target/triton/columns": "kernels/test_narrow",
    "target/triton/kernel": "kernels/test_two_pass",
    "target/triton/parameters": "kernels/test_packed_gradients",
    "target/triton/program": "plan/test_access",
}
MODULES = sorted(
    str(path.relative_to(ROOT / "attnc").with_suffix(""))
    for package in PACKAGES
    for path in (ROOT / "attnc" / package).rglob("*.py")
    if path.name != "__init__.py"
)


def own_file(module: str) -> Path:
    """`tests/plan/test_sm90_roles.py` for `plan/sm90/roles`."""
    package, *names = module.split("/")
    return ROOT / "tests" / package / f"test_{'_'.join(names)}.py"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_test_file_of_its_name(module: str) -> None:
    """Or one place where it is tested, and never both."""
    own = own_file(module)
    elsewhere = TESTED_ELSEWHERE.get(module)
    if elsewhere is None:
        assert own.is_file(), f"tests of attnc/{module}.py belong in {own.relative_to(ROOT)}"
    else:
        assert not own.exists(), f"{own.relative_to(ROOT)} is there: take {module} off the list"
        assert (ROOT / "tests" / f"{elsewhere}.py").is_file()


def test_exceptions_are_few_and_name_modules() -> None:
    assert TESTED_ELSEWHERE.keys() <= set(MODULES)
    assert len(TESTED_ELSEWHERE) <= 30


def test_tests_of_verify_are_named_after_its_modules() -> None:
    """What tests kernels, and no module of attnc/verify, is in tests/kernels."""
    modules = {path.stem for path in (ROOT / "attnc" / "verify").glob("*.py")}
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "verify").glob("test_*.py")}
    # of `properties`, `covering` and `simt`
    assert files - modules == {"foreign_specs", "joins", "simt_hopper"}
