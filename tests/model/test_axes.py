"""What each axis of q, k, v, o and lse is."""

import pytest

from attnc.model.tensors import Role
from tests.model.resolving import errors_of, plain, spec

BATCH, QUERY, KEY, HEAD, FEATURE = Role.BATCH, Role.QUERY, Role.KEY, Role.HEAD, Role.FEATURE


@pytest.mark.parametrize(
    ("name", "q", "k", "lse"),
    [
        ("fa1", (BATCH, HEAD, QUERY, FEATURE), (BATCH, HEAD, KEY, FEATURE), (BATCH, HEAD, QUERY)),
        ("causal_gqa", (BATCH, QUERY, HEAD, FEATURE), (BATCH, KEY, HEAD, FEATURE), (BATCH, HEAD, QUERY)),
        ("odd_dims", (BATCH, QUERY, HEAD, FEATURE), (BATCH, KEY, HEAD, FEATURE), (BATCH, QUERY, HEAD)),
        ("varlen", (QUERY, HEAD, FEATURE), (KEY, HEAD, FEATURE), (QUERY, HEAD)),
    ],
)
def test_roles_are_read_off_the_shape(
    name: str, q: tuple[Role, ...], k: tuple[Role, ...], lse: tuple[Role, ...] | None
) -> None:
    attention = spec(name)
    assert attention.q.roles == q
    assert attention.o.roles == q
    assert attention.k.roles == attention.v.roles == k
    assert (attention.lse.roles if attention.lse else None) == lse


@pytest.mark.parametrize(
    ("given", "place", "meant"),
    [
        ("1, M, 1, D", "1", "B, M, 1, D"),
        ("B, 577, 12, D", "577", "B, M, 12, D"),
        ("B, 12, 577, D", "577", "B, 12, M, D"),
        ("2, 12, 577, D", "2", "B, 12, M, D"),
        ("2, 577, Hkv * G, D", "2", "B, M, Hkv * G, D"),
        ("M, 12, 2, D", "12", "M, B, 2, D"),
    ],
)
def test_numbers_where_sequences_and_rows_are_counted(given: str, place: str, meant: str) -> None:
    found = errors_of(plain().replace("q: bf16[B, M, Hkv * G, D]", f"q: bf16[{given}]"))[0]
    assert (found.code, found.primary.span.text) == ("E0309", place)
    assert found.hints[0].startswith(f"write '[{meant}]'")


@pytest.mark.parametrize("given", ["B, M, 8, 4, D", "B, M, D", "B, 577, D", "2, 3, 4, 5, D"])
def test_other_numbers_are_heads(given: str) -> None:
    found = errors_of(plain().replace("q: bf16[B, M, Hkv * G, D]", f"q: bf16[{given}]"))[0]
    assert found.code == "E0309"
    assert not any(hint.startswith("write '[") for hint in found.hints)
