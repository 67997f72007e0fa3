"""Checks of what resolved (the golden diagnostics show each)."""

from tests.model.resolving import plain, resolve_text


def test_unused_names_are_warned_of() -> None:
    program = resolve_text(plain("param W in {1, 2}\n  input doc: i32[B, N]\n  let x = q_idx"))
    assert [d.message for d in program.warnings] == [
        "param 'W' is never used",
        "input 'doc' is never used",
        "let 'x' is never used",
    ]
