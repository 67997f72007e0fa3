"""Random specs of other people's taste: what papers and model code add to a score, composed.

Gates and their logarithms, forgetting, temperatures, tables of relative positions, slopes, soft caps, decays,
distances of data, sinks, and masks over data. Scores are written as such code writes them: with logarithms of
what may be 0 or negative, quotients by what may be small, and exponentials of anything. So minus infinities
and NaN are ordinary here, which `tests.verify.random_specs` seldom has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import strategies as st

from tests.verify.random_specs import HEADS, HOPPER, Shape, Storage, draw_schedule, is_lowered

#: Sizes of a head that every target has kernels for, in tiles of its own.
_WIDTHS, _WIDE = (16, 32, 64), (64, 96, 128)
#: Rows and keys of documents end to end, in one of eight specs.
_PACKED = Storage(q="ragged", kv="ragged")


@dataclass(slots=True)
class Pen:
    """What a spec is written with. heads: of queries, as shapes spell it; inputs: declared so far, by name,
    and whether a gradient can be asked for.
    """

    draw: st.DrawFn
    heads: str
    dtype: str
    inputs: dict[str, str] = field(default_factory=dict)
    floats: list[str] = field(default_factory=list)

    def one_of(self, *choices: str) -> str:
        return self.draw(st.sampled_from(choices))

    def input(self, stem: str, shape: str, dtype: str = "") -> str:
        """Declares an input, by default of floats, and returns its name; H stands for the query heads."""
        dtype = dtype or self.one_of("f32", "f32", "f32", self.dtype)
        name = next(
            name for name in (stem, *(f"{stem}_{n}" for n in range(2, 99))) if name not in self.inputs
        )
        axes = [self.heads if axis == "H" else axis for axis in shape.split()]
        self.inputs[name] = f"input {name}: {dtype}[{', '.join(axes)}]"
        if dtype in ("f32", self.dtype):
            self.floats.append(name)
        return name

    def loaded(self, stem: str, at: str, dtype: str = "") -> str:
        """An element of a new input, one for each of these: "b h kv_idx", "h", or "" for one number."""
        sizes = {"b": "B", "h": "H", "q_idx": "M", "q_pos": "N", "kv_idx": "N"}
        name = self.input(stem, " ".join(sizes[index] for index in at.split()), dtype)
        return f"{name}[{', '.join(at.split())}]" if at else name

    def by_key(self, stem: str) -> str:
        return self.loaded(stem, self.one_of("b h kv_idx", "b kv_idx", "h kv_idx", "kv_idx"))

    def by_row(self, stem: str) -> str:
        return self.loaded(stem, self.one_of("b h q_idx", "b q_idx", "b h q_pos", "h q_pos"))

    def by_head(self, stem: str) -> str:
        return self.loaded(stem, self.one_of("h", "h", "b h", ""))

    def both(self, stem: str, dtype: str = "") -> tuple[str, str]:
        """Elements of one new input for the query and for the key."""
        head = self.one_of("", "h, ", "b, ", "b, h, ")
        axes = {"": "N", "h, ": "H N", "b, ": "B N", "b, h, ": "B H N"}[head]
        name = self.input(stem, axes, dtype)
        return f"{name}[{head}{self.one_of('q_pos', 'q_idx')}]", f"{name}[{head}kv_idx]"


Term: TypeAlias = Callable[[Pen, str], str]


def _forgetting(pen: Pen, s: str) -> str:
    q, k = pen.both("c")
    name = q.split("[")[0]
    if ": f32" in pen.inputs[name] and pen.draw(st.booleans()):
        pen.inputs[name] += " is descending"
        return f"{s} + {q} - {k}"
    return pen.one_of(f"{s} + {q} - {k}", f"{s} + min({q} - {k}, 0)", f"{s} - abs({q} - {k})")


def _log_of_gate(pen: Pen, s: str) -> str:
    gate = pen.one_of(pen.by_key("g"), pen.by_row("g"))
    log = pen.one_of(
        "log({})",
        "log({})",
        "log(sigmoid({}))",
        "log(abs({}) + 1e-6)",
        "log(max({}, 1e-4))",
        "log2({})",
        "log(1 + exp({}))",
        "(0 - log(1 + exp(-{})))",
        "log(clamp({}, 0.0, 1.0))",
        "0.5 * log({})",
    ).format(gate)
    return f"{s} + {log}"


def _gate(pen: Pen, s: str) -> str:
    gate = pen.one_of(pen.by_key("gate"), pen.by_row("gate"), pen.by_head("gate"))
    form = pen.one_of("{}", "sigmoid({})", "tanh({})", "exp({})", "(1 + {})", "max({}, 0)", "({0} * {0})")
    return f"({s}) * {form.format(gate)}"


def _gates_of_both(pen: Pen, s: str) -> str:
    q, k = pen.both("u")
    return pen.one_of(
        f"{s} + {q} * {k}",
        f"({s}) * {q} * {k}",
        f"({s}) / sqrt({q} * {k})",
        f"({s}) / ({q} * {k})",
        f"({s}) * exp({q} - {k})",
        f"{s} + log({q} / {k})",
        f"({s}) * sigmoid({q} + {k})",
        f"{s} + log(sigmoid({q} - {k}))",
        f"{s} + exp({k}) - exp({q})",
    )


def _temperature(pen: Pen, s: str) -> str:
    t = pen.by_head("t")
    return pen.one_of(
        f"({s}) * {t}",
        f"({s}) / {t}",
        f"({s}) * exp({t})",
        f"({s}) * min(exp({t}), 100)",
        f"({s}) / max({t}, 0.01)",
        f"({s}) / (abs({t}) + 0.1)",
        f"({s}) * sqrt({t})",
        f"({s}) * log(1 + exp({t}))",
        f"({s}) * exp2({t})",
        f"({s}) / ({t} * {t})",
        f"({s}) / sqrt({t})",
    )


def _temperature_of_rows(pen: Pen, s: str) -> str:
    t = pen.by_row("tau")
    return pen.one_of(
        f"({s}) * {t}",
        f"({s}) / {t}",
        f"({s}) * log(q_pos + 2)",
        f"({s}) * (1 + 0.1 * log(1 + q_pos // 8))",
        f"({s}) * exp({t})",
        f"({s}) * log(N) / 4",
        f"({s}) / (1 + exp({t}))",
    )


def _relative_table(pen: Pen, s: str) -> str:
    reach = pen.draw(st.sampled_from((3, 8, 16)))
    clamped = f"clamp(q_pos - kv_idx, -{reach}, {reach}) + {reach}"
    place = pen.one_of(
        clamped,
        f"clamp(q_pos - kv_idx, 0, {reach})",
        f"clamp(q_idx - kv_idx, -{reach}, {reach}) + {reach}",
        f"q_pos - kv_idx + {reach}",
        f"min(abs(q_pos - kv_idx), {reach})",
        "clamp(q_idx // 7 - kv_idx // 7, -1, 1) * 3 + clamp(q_idx % 7 - kv_idx % 7, -1, 1) + 4",
        f"where(kv_idx > q_pos, {reach}, 0) + min(abs(q_pos - kv_idx), {reach - 1})",
    )
    size = str(2 * reach + 1)
    shape, at = pen.draw(
        st.sampled_from(((f"H {size}", "h, {}"), (f"{size} H", "{}, h"), (size, "{}"), ("H R", "h, {}")))
    )
    bias = f"{pen.input('table', shape)}[{at.format(place)}]"
    return pen.one_of(
        f"{s} + {bias}", f"{s} + {bias}", f"({s}) * (1 + {bias})", f"{s} + 16 * sigmoid({bias})"
    )


def _slope(pen: Pen, s: str) -> str:
    slope = pen.one_of(pen.by_head("slope"), pen.by_row("slope"), pen.by_key("slope"))
    form = pen.one_of("{}", "exp({})", "abs({})", "log(1 + exp({}))", "exp2(-{})").format(slope)
    distance = pen.one_of(
        "abs(q_pos - kv_idx)", "(q_pos - kv_idx)", "max(q_pos - kv_idx, 0)", "(kv_idx - q_pos)"
    )
    return pen.one_of(
        f"{s} - {form} * {distance}",
        f"{s} + {form} * {distance}",
        f"{s} - {form} * log(1 + abs(q_pos - kv_idx))",
        f"{s} - {form} * sqrt(abs(q_pos - kv_idx))",
        f"{s} + {distance} * log({slope})",
        f"{s} + {distance} * log(sigmoid({slope}))",
        f"({s}) * exp(-{form} * abs(q_pos - kv_idx))",
        f"{s} - log(1 + {form} * abs(q_pos - kv_idx))",
    )


def _cap(pen: Pen, s: str) -> str:
    cap = pen.by_head("cap")
    return pen.one_of(
        f"softcap({s}, 20.0)",
        f"30 * tanh(({s}) / 30)",
        f"{cap} * tanh(({s}) / {cap})",
        f"clamp({s}, -8.0, 8.0)",
        f"min({s}, {cap})",
        f"(1 + exp({cap})) * tanh(({s}) / (1 + exp({cap})))",
        f"softcap({s}, 5.0) + softcap({cap}, 2.0)",
    )


def _bias(pen: Pen, s: str) -> str:
    pair = pen.loaded("bias", pen.one_of("b h q_idx kv_idx", "h q_idx kv_idx", "q_idx kv_idx"))
    form = pen.one_of(
        "{}",
        "{}",
        "log({})",
        "log({} + 1e-6)",
        "exp({})",
        "tanh({})",
        "log(sigmoid({}))",
        "({0} * {0})",
        "max({}, -inf)",
        "2 * min({}, 0)",
        "where({0} > 0, {0}, -inf)",
    ).format(pair)
    return f"{s} + {form}"


def _time(pen: Pen, s: str) -> str:
    q, k = pen.both("time")
    rate = pen.by_head("rate")
    return pen.one_of(
        f"{s} - {rate} * abs({q} - {k})",
        f"{s} - ({q} - {k}) * ({q} - {k}) / (2 * {rate} * {rate})",
        f"({s}) * exp(-abs({q} - {k}))",
        f"{s} - log(1 + ({q} - {k}) * ({q} - {k}))",
        f"{s} - exp({rate}) * abs({q} - {k})",
        f"{s} + {rate} / (1 + abs({q} - {k}))",
        f"{s} + log(abs({q} - {k}))",
        f"{s} + {rate} * exp(-({q} - {k}) * ({q} - {k}))",
    )


def _choice(pen: Pen, s: str) -> str:
    x, y = pen.by_key("x"), pen.by_head("y")
    q, k = pen.both("kind", "i32")
    flag = pen.loaded("flag", "b kv_idx", "bool")
    return pen.one_of(
        f"where({flag}, {s}, {s} - {y})",
        f"where({x} > 0.5, {s}, -inf)",
        f"where({q} == {k}, {s} + {y}, {s})",
        f"where({x} > 0, {s} + {x}, {s} - exp({x}))",
        f"where({flag}, {s}, 0.5 * ({s}) + {x})",
        f"where({x} > 0, {s} + log({x}), -inf)",
        f"where({x} > 0, {s} + log({x}), {s})",
        f"where(kv_idx < 4, {s}, {s} + {x})",
        f"where({flag}, {s} / {y}, {s})",
        f"where({flag}, {s}, -1e4)",
    )


def _shaped(pen: Pen, s: str) -> str:
    """What is done to a whole score."""
    p = pen.by_head("power")
    return pen.one_of(
        f"exp({p} * log(abs({s})))",
        f"log(1 + exp({s}))",
        f"log(max({s}, 0) + {p})",
        f"({s}) * sigmoid({s})",
        f"log(sigmoid({s}))",
        f"max({s}, {p} * ({s}))",
        f"({s}) * abs({s})",
        f"2 * log(abs({s}))",
        f"erf({s}) * {p}",
        f"({s}) * ({s}) / 4",
        f"log(({s}) * ({s}) + 1e-4)",
    )


def _prior(pen: Pen, s: str) -> str:
    """Numbers for each key that are probabilities, counts or norms."""
    n = pen.by_key("n")
    return pen.one_of(
        f"({s}) / {n}",
        f"({s}) / sqrt({n})",
        f"({s}) / max({n}, 1e-3)",
        f"{s} + log({n} / N)",
        f"({s}) / (1e-6 + {n})",
        f"{s} - {n} * {n} / 2",
        f"{s} + log(1 - {n})",
        f"{s} + log({n}) - log(1 - {n})",
        f"{s} - 1 / {n}",
        f"({s}) * exp(-{n})",
        f"{s} + exp2({n}) - 1",
    )


_TERMS: Sequence[Term] = (
    _forgetting,
    _forgetting,
    _log_of_gate,
    _log_of_gate,
    _gate,
    _gates_of_both,
    _temperature,
    _temperature,
    _temperature_of_rows,
    _relative_table,
    _relative_table,
    _slope,
    _slope,
    _cap,
    _bias,
    _time,
    _choice,
    _shaped,
    _prior,
)


def _masks(pen: Pen) -> Iterator[str]:
    """The conditions of a mask, joined by `and`."""
    q, k = pen.both("seg", "i32")
    choices = (
        "causal",
        "causal",
        "causal",
        "window(40, 0)",
        "q_idx >= kv_idx",
        pen.loaded("keep", "b kv_idx", "bool"),
        pen.loaded("seen", "b h q_idx kv_idx", "bool"),
        f"{q} == {k}",
        f"{k} <= {q}",
        f"({q} == {k} or kv_idx < 4)",
        f"{k} >= 0",
        f"{pen.by_key('open')} > 0.3",
        f"not {pen.loaded('pad', 'b kv_idx', 'bool')}",
        f"{pen.by_row('own')} < {pen.by_key('limit')}",
        f"kv_idx < {pen.loaded('used', 'b', 'i32')}",
        f"kv_idx > q_pos - {pen.loaded('w', 'h', 'i32')}",
        f"({pen.loaded('wide', 'h', 'bool')} or kv_idx > q_pos - 32)",
        f"{pen.input('blocks', 'B 8 8', 'bool')}[b, q_idx // 16, kv_idx // 16]",
        f"{pen.input('start', '4', 'i32')}[b] <= kv_idx",
    )
    for _ in range(pen.draw(st.integers(0, 2))):
        yield pen.draw(st.sampled_from(choices))


@st.composite
def foreign_specs(draw: st.DrawFn, *, targets: Sequence[str] = ("triton",), wide: bool = False) -> str:
    """The text of a file with one attention, nearly always with gradients, and its schedule for each of the
    targets; for Hopper where that lowers the attention. wide: heads and tiles as large as those of models.
    """
    hopper = HOPPER in targets
    dtype = draw(st.sampled_from(("bf16", "f16") if hopper else ("bf16", "f16", "f32")))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    storage = draw(st.sampled_from((Storage(),) * 7 + (_PACKED,)))
    d = draw(st.sampled_from(_WIDE if wide else _WIDTHS))
    pen = Pen(draw, heads, dtype)
    score = draw(
        st.sampled_from(("dot(q, k) / sqrt(D)", "dot(q, k) / sqrt(D)", "dot(q, k)", "0.125 * dot(q, k)"))
    )
    for term in draw(st.lists(st.sampled_from(_TERMS), min_size=1, max_size=3)):
        score = term(pen, score)
    mask = " and ".join(_masks(pen))
    softmax = "softmax"
    match draw(st.integers(0, 9)):
        case 0 | 1:
            softmax = f"softmax(sink = {pen.input('sink', 'H', 'f32')}[h])"
        case 2 if not hopper:
            pen.inputs |= {"p": "input p: f32[]", "seed": "input seed: i64[]"}
            softmax = "softmax(dropout = p, seed = seed)"
    read = _names_in(f"{score} {mask} {softmax}")
    grads = [name for name in pen.floats if name in _names_in(score + softmax)]
    statements = [
        f"input q: {dtype}[{', '.join(storage.q_axes(heads))}, {d}]{storage.q_via}",
        f"input k, v: {dtype}[{', '.join(storage.kv_axes(kv_heads))}, {d}]{storage.kv_via(16)}",
        *storage.inputs,
        *(declared for name, declared in pen.inputs.items() if name in read),
        f"score = {score}",
        *([f"mask = {mask}"] if mask else []),
        f"normalize = {softmax}",
        f"output o: {dtype}[{', '.join(storage.q_axes(heads))}, {d}]",
        *([f"output lse: f32[{', '.join(storage.q_axes(heads))}]"] if draw(st.booleans()) else []),
        *([f"grad {', '.join(('q', 'k', 'v', *grads))}"] if draw(st.integers(0, 11)) < 11 else []),
    ]
    text = "\n  ".join(["attention foreign {", *statements]) + "\n}\n"
    has_grad = any(line.startswith("grad") for line in statements)
    made = []
    for target in targets:
        shape = Shape(
            target=target,
            storage=storage,
            decodes=False,
            wide=wide,
            sums_dq=has_grad,
            joins_bytes="dropout" in softmax and re.search(r": (bool|u8)\[", text) is not None,
        )
        drawn = f"schedule foreign for {target} {{\n  {draw_schedule(draw, shape)}\n}}\n"
        plain = f"schedule foreign for {target} {{ loops = [q, kv] }}\n"
        made += [schedule for schedule in (drawn, plain) if is_lowered(text + schedule)][:1]
    return text + "".join(made)


def _names_in(text: str) -> set[str]:
    """All words of a text."""
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
