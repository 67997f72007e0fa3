"""What is said of wrong specs beyond the golden files: everything at once, nothing twice."""

import pytest

from attnc.diagnostics.diagnostic import MAX_DIAGNOSTICS
from tests.model.resolving import codes_of, errors_of, plain, resolve_text


def test_independent_mistakes_are_reported_at_once_and_in_order() -> None:
    text = plain("input doc: i33[B]\n  let x = nowhere", score="dot(q, k) + y", mask="kv_idx") + (
        "schedule plain for tritn {\n  stage = 2\n}\nschedule plane for triton {\n}\n"
    )
    found = errors_of(text)
    assert [d.code for d in found] == ["E0211", "E0203", "E0203", "E0304", "E0401", "E0402", "E0210"]
    assert [d.primary.span.start for d in found] == sorted(d.primary.span.start for d in found)


@pytest.mark.parametrize(
    "text",
    [
        plain("let x = nowhere\n  let y = x + 1", mask="x > y and y > 0"),
        plain("input x: f33[B]\n  let y = x[b, h]", score="dot(q, k) + y + x"),
        plain("param W in {1, true}", mask="kv_idx < W").replace("N, Hkv", "N, Hkv"),
        plain("param T in {f16, i32}\n  input x: T[N]", score="dot(q, k) + x[b, h, kv_idx]"),
        "def f(x) = f(x)\n" + plain(mask="f(1) or f(2)"),
        "def f(x) = nowhere\ndef g = f(1)\n" + plain(mask="f(1) or g"),
        plain().replace("input q: bf16[B, M, Hkv * G, D]", "input q: bf16[B, M, X, D]"),
        plain().replace("input q: bf16[B, M, Hkv * G, D]", "input q: bf16[B, M, 3, D]"),
        plain("input b: f32[H]", score="dot(q, k) * b[h]"),
        plain("input x: f32[H]\n  let x = 1", score="dot(q, k) * x[h] + x"),
        plain(mask="window(kv_indx, kv_indx, 3)").replace(", 3", ""),
    ],
)
def test_what_follows_from_a_mistake_is_silent(text: str) -> None:
    assert len({d.primary.span for d in errors_of(text)}) == len(codes_of(text))
    assert len(codes_of(text)) == 1 + text.count("kv_indx") // 2


def test_schedules_of_an_attention_with_mistakes_are_still_checked() -> None:
    text = plain(mask="lost") + "schedule plain for triton {\n  where lst < 3\n}\n"
    assert codes_of(text) == ["E0203", "E0203"]


def test_warnings_do_not_stop_anything() -> None:
    extra = "\n  ".join(f"input x{i}: f32[H]" for i in range(3 * MAX_DIAGNOSTICS))
    assert len(resolve_text(plain(extra)).warnings) == MAX_DIAGNOSTICS


def test_errors_stop_at_a_limit() -> None:
    extra = "\n  ".join(f"let x{i} = lost{i}" for i in range(3 * MAX_DIAGNOSTICS))
    assert len(errors_of(plain(extra))) == MAX_DIAGNOSTICS


# --- hostile specs, each of which would take very long or overflow Python's stack without a limit ---


def chain(first: str, step: str, length: int = 1500) -> str:
    """`def g0 = first`, then `def g1 = step` with `_` for the def before, and so on."""
    lines = [f"def g0 = {first}"]
    lines += [f"def g{i} = {step.replace('_', f'g{i - 1}')}" for i in range(1, length)]
    return "\n".join(lines) + "\n" + plain(mask=f"g{length - 1}")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param(chain("causal", "not _"), "E0506", id="long"),
        pytest.param(chain("causal", "_ and _ or _", 60), "E0506", id="exponential"),
        pytest.param(chain("g1499", "_"), "E0205", id="cycle"),
        pytest.param(
            plain("let x0 = b" + "".join(f"\n  let x{i} = x{i - 1} + x{i - 1}" for i in range(1, 999))),
            "E0506",
            id="lets",
        ),
        pytest.param(plain(mask=" and ".join(["causal"] * 5000)), "E0506", id="wide"),
        pytest.param(
            plain("param W in {" + ", ".join(map(str, range(7_000))) + ", 1.5, 7}", mask="kv_idx < W"),
            "E0307",
            id="choices",
        ),
        pytest.param(
            plain("\n  ".join(f"input x{i}: f32[Y{i} * Y{i + 1}]" for i in range(1500))), "E0321", id="sizes"
        ),
    ],
)
def test_hostile_specs_are_refused_fast(text: str, code: str) -> None:
    assert code in codes_of(text)
