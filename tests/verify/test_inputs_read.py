"""What an attention reads its inputs as."""

from collections.abc import Callable

import pytest

from attnc.model.attention import Attention
from attnc.verify import inputs_read
from tests.model.resolving import resolve_text

_SPEC = """
attention reads {
  input q: bf16[B, M, H, 64]
  input k, v: bf16[B, N, H, 64]
  input bias: f32[H, N]
  input slopes: f32[H]
  input sinks: f32[H]
  input words: i32[M]
  input ids: i32[B, N]
  input parts: i32[H]
  input gate: f32[B, M, H]
  input rate: f32[]
  input seed: i64[]
  score = dot(q, k) / 8 - slopes[h] * abs(q_pos - kv_idx) + bias[h, kv_idx]
  mask = bit(words[q_idx], kv_idx % 32) and ids[b, q_idx] == ids[b, kv_idx] and kv_idx % parts[h] == 0
  normalize = softmax(sink = sinks[h], dropout = rate, seed = seed)
  output o: bf16[B, M, H, 64] = sigmoid(gate[b, q_idx, h]) * attention
}
schedule reads for triton { tile.q = 64, tile.kv = 64 }
"""


@pytest.fixture(scope="module")
def attention() -> Attention:
    return resolve_text(_SPEC).attention("reads")


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (inputs_read.addresses, {"seed"}),
        (inputs_read.addends, {"bias"}),
        (inputs_read.find_slopes, {"slopes"}),
        (inputs_read.find_sinks, {"sinks"}),
        (inputs_read.find_words, {"words"}),
        (inputs_read.find_compared, {"ids"}),
        (inputs_read.find_divisors, {"parts"}),
        (inputs_read.find_saturated, {"gate"}),
        (inputs_read.probabilities, {"rate"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_inputs_are_known_by_what_they_are_read_as(
    attention: Attention, found: Callable[[Attention], set[str]], names: set[str]
) -> None:
    assert found(attention) == names
