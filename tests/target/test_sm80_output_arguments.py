"""The struct of arguments, as C++ declares it."""

from __future__ import annotations

from dataclasses import replace

from tests.target.texts import text_of


def test_fields_are_maps_pointers_strides_and_sizes() -> None:
    arguments = text_of("causal_gqa", "bf16_d128").arguments
    made = replace(arguments, maps=("q",), workspaces=["int* counter_ptr;"])
    first, *others, last = made.fields
    assert first == "TensorMap q_map;"
    assert last == f"int {', '.join(arguments.sizes)};"
    pointers = [line for line in others if "_ptr;" in line]
    assert others[: len(pointers)] == pointers
    assert pointers[0] == "const element* q_ptr;"
    assert pointers[-1] == "int* counter_ptr;"
    assert all(line.startswith("long long stride_") for line in others[len(pointers) :])


def test_names_are_those_of_pointers() -> None:
    arguments = text_of("causal_gqa", "bf16_d128").arguments
    assert arguments.names[:4] == ["q", "k", "v", "o"]
    assert len(arguments.strides) == len(arguments.names)
