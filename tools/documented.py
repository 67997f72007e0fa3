"""What the documentation must say, computed from the program: tables, the page of diagnostics, the commands.

`tests/test_docs.py` compares it with the pages; `pytest tests/test_docs.py --update-golden` writes it there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from attnc.build import MAX_MODULES, plan_program
from attnc.cli.platforms import GPUS, SYSTEMS, state_of
from attnc.diagnostics import CODES, DiagnosticError
from attnc.effort import MAX_STEPS, STEPS_PER_PIECE
from attnc.expr.interval import SIZE
from attnc.model.configs import MAX_CONFIGS
from attnc.model.declarations import MAX_HEAD_DIM
from attnc.model.elaborate import MAX_CALLS, MAX_NODES
from attnc.model.elaborate import MAX_DEPTH as MAX_LEVELS
from attnc.model.knobs import ACCUMULATE, ACCUMULATE_DQ, KEYS, Key
from attnc.model.names import DECODING, GLOBALS, KEYS_FIRST, READ, RESERVED, TAKING_TILES, WITH_GRADIENTS
from attnc.model.program import Program
from attnc.model.resolve import resolve
from attnc.model.schedule import Choice, Value, whole_of
from attnc.model.storage import MAX_PAGE
from attnc.model.variants import MAX_VARIANTS
from attnc.source import Source
from attnc.syntax.parser import MAX_CHARACTERS, MAX_DEPTH, MAX_DIGITS, MAX_NAME, MAX_TOKENS, parse, prelude
from tools.documentation import ROOT, cells, region, table

#: Columns of the tables of what is compiled.
TARGETS = {"triton": "Triton", "cuda.sm_80": "CUDA sm_80", "cuda.sm_90a": "CUDA sm_90a"}

#: Settings that show whether a target honours a key: what to call it, and how it is written.
PROBES: Mapping[str, Mapping[str, str]] = {
    "loops": {
        "[q, kv]": "loops = [q, kv]",
        "[kv, q]": "loops = [kv, q], softmax = online(rescale = every_step)",
        "[kv]": "loops = [kv]",
    },
    "tile.q": {"tiles": "tile.q = 128"},
    "tile.kv": {"tiles": "tile.kv = 64"},
    "tile.d": {"tiles": "tile.d = 32", "256 of latent attention": "loops = [kv], pack = gqa, tile.d = 256"},
    "warps": {"4, 8": "warps in {4, 8}", "12": "warps = 12"},
    "warp_split": {"q": "warp_split = q", "kv": "warp_split = kv"},
    "stages": {"1, 2": "stages in {1, 2}"},
    "split.kv": {"1": "split.kv = 1", "counts": "split.kv = 4", "auto": "split.kv = auto"},
    "pack": {"none": "pack = none", "gqa": "pack = gqa"},
    "softmax": {
        "deferred": "softmax = online",
        "every_step": "softmax = online(rescale = every_step)",
        "lazy": "softmax = online(rescale = lazy(8))",
        "maximum": "softmax = online(maximum = lazy(20))",
        "two_pass": "softmax = two_pass",
        "unified_max": "loops = [kv], softmax = unified_max(phi = 0, bounds = [-4, 11], fallback = online)",
    },
    "consumers": {"3": "consumers = 3"},
    "overlap": {"true": "overlap = true", "false": "overlap = false"},
    "cluster": {"2": "cluster = 2"},
    "blocks": {"2": "blocks = 2, overlap = false, tile.kv = 64"},
    "pingpong": {"true": "pingpong = true", "false": "pingpong = false"},
    "registers": {"224": "registers = 224"},
    "convert": {"before": "convert = before", "tiles": "convert = tiles"},
    "lists": {
        "each": "loops = [kv], pack = gqa, lists = each",
        "union": "loops = [kv], pack = gqa, lists = union",
    },
    "persistent": {"true": "persistent = true"},
    "order": {"longest_first": "order = longest_first"},
    "maxnreg": {"168": "backward {\nmaxnreg = 168\n}"},
    "dp": {order: f"backward {{\ndkdv {{\ndp = {order}\n}}\n}}" for order in ("early", "late")},
    "accumulate.dq": {
        way: f"backward {{\naccumulate.dq = {way}\n}}"
        for way in ("two_pass", "atomic", "ordered", "sequential")
    },
}

#: An attention that every target compiles, statement by statement.
_PLAIN = {
    "q": "input q: f16[B, M, Hkv * G, 64]",
    "k": "input k: f16[B, N, Hkv, 64]",
    "v": "input v: f16[B, N, Hkv, 64]",
    "o": "output o: f16[B, M, Hkv * G, 64]",
    "normalize": "normalize = softmax",
    "more": "",
}
_LENGTHS = "input lens: i32[B]\nlength N = lens[b]"
_RAGGED = "via ragged(ends)"
_PACKED = {
    "q": f"input q: f16[T, Hkv * G, 64] {_RAGGED}",
    "k": f"input k: f16[S, Hkv, 64] {_RAGGED}",
    "v": f"input v: f16[S, Hkv, 64] {_RAGGED}",
    "o": "output o: f16[T, Hkv * G, 64]",
    "more": "input ends: i32[B + 1]",
}
_PAGED = {
    "k": f"{_PLAIN['k']} via paged(table, page = 16)",
    "v": f"{_PLAIN['v']} via paged(table, page = 16)",
    "more": f"input table: i32[B, P]\n{_LENGTHS}",
}
#: Multi-head latent attention, which 256 columns of o are of.
_LATENT = {
    "q": "input q: f16[B, M, G, 576]",
    "k": "input k: f16[B, N, 1, 576]",
    "v": "input v: f16[B, N, 1, 512] via prefix(k)",
    "o": "output o: f16[B, M, G, 512]",
}
#: Eight heads that select keys together, of which eight queries fill a tile.
_OF_EIGHT_HEADS = {
    "q": "input q: f16[B, M, 8, 64]",
    "k": "input k: f16[B, N, 1, 64]",
    "v": "input v: f16[B, N, 1, 64]",
    "o": "output o: f16[B, M, 8, 64]",
    "more": "input chosen: i32[B, M, S]",
}
#: Rows of the table of what is compiled: the statements that differ from the plain ones.
FEATURES: Mapping[str, Mapping[str, str]] = {
    "forward: MHA, GQA, MQA, any score and mask": {},
    "gradients (`grad`)": {"more": "grad q, k, v"},
    "`f32` inputs": {name: text.replace("f16", "f32") for name, text in _PLAIN.items()},
    "`o` of another type than `q`": {"o": _PLAIN["o"].replace("f16", "f32")},
    "`D` or `Dv` that is no multiple of 8": {
        name: text.replace(", 64]", ", 20]") for name, text in _PLAIN.items()
    },
    "`Dv` other than `D`": {name: _PLAIN[name].replace(", 64]", ", 128]") for name in "vo"},
    "`softmax(sink = ...)`": {"normalize": "normalize = softmax(sink = s[h])", "more": "input s: f32[H]"},
    "`softmax(dropout = ...)`": {
        "normalize": "normalize = softmax(dropout = 0.1, seed = seed)",
        "more": "input seed: i64[]",
    },
    "`softmax(v_scale = ...)`": {
        "normalize": "normalize = softmax(v_scale = s[h])",
        "more": "input s: f32[H]",
    },
    "`normalize = none`": {"normalize": "normalize = none\nweight = sigmoid(score)"},
    "`normalize = softpick`": {"normalize": "normalize = softpick", "more": "grad q, k, v"},
    "`normalize = stick_breaking`": {"normalize": "normalize = stick_breaking"},
    "gradients of `stick_breaking`": {"normalize": "normalize = stick_breaking", "more": "grad q, k, v"},
    "`order = absolute(...)`": {"more": "order = absolute(2048)"},
    "`output o: ... = ...`": {
        "o": f"{_PLAIN['o']} = gate[b, q_idx, h, d] * attention",
        "more": "input gate: f16[B, M, Hkv * G, 64]",
    },
    "`k` and `v` of `e4m3`, `e5m2` or `i8`": {name: _PLAIN[name].replace("f16", "e4m3") for name in "kv"},
    "`length M`, `length N`": {"more": f"{_LENGTHS}\nlength M = lens[b]"},
    "`via ragged(...)`": _PACKED,
    "gradients of `via ragged(...)`": {**_PACKED, "more": f"{_PACKED['more']}\ngrad q, k, v"},
    "`via paged(...)`": _PAGED,
    "gradients of `via paged(...)`": {**_PAGED, "more": f"{_PAGED['more']}\ngrad q, k, v"},
    "`via prefix(k)`": {
        "v": "input v: f16[B, N, Hkv, 32] via prefix(k)",
        "o": "output o: f16[B, M, Hkv * G, 32]",
    },
}


def program_of(text: str, name: str = "probe.attn") -> Program:
    """The spec, resolved. Raises DiagnosticError."""
    return resolve(parse(Source(name, text)), prelude())


def is_compiled(text: str) -> bool:
    """Whether the target of the spec's schedule compiles all of it; any other mistake is an error here."""
    try:
        planned = plan_program(program_of(text))
    except DiagnosticError as failure:
        if {d.code for d in failure.diagnostics if d.severity == "error"} <= {"E0601", "E0602"}:
            return False
        raise
    return bool(planned.modules) and not {d.code for d in planned.warnings} & {"W0802", "W0803"}


def _compiles(target: str, changes: Mapping[str, str], setting: str = "tile.kv = 64") -> bool:
    mask = "listed(chosen, rows = 1, keys = 1)" if "chosen" in changes.get("more", "") else "causal"
    statements = "\n".join(
        [*({**_PLAIN, **changes}.values()), "score = dot(q, k) / sqrt(64)", f"mask = {mask}"]
    )
    return is_compiled(
        f"attention probe {{\n{statements}\n}}\nschedule probe for {target} {{\n{setting}\n}}\n"
    )


def status() -> str:
    """The table of what each target compiles today."""
    rows = [("", *TARGETS.values()), ("---",) * (1 + len(TARGETS))]
    for name, changes in FEATURES.items():
        rows.append((name, *("yes" if _compiles(target, changes) else "not yet" for target in TARGETS)))
    return table(rows)


def keys(page: str) -> str:
    """The table of schedule keys; the last column, what a key means, is the page's own."""
    meanings = {row[0]: row[-1] for line in region(page, "keys").splitlines() if len(row := cells(line)) > 1}
    rows = [("key", "values", "default", "phases", *TARGETS.values(), "meaning")]
    rows.append(("---",) * len(rows[0]))
    for name, key in {**KEYS, "accumulate.dq": ACCUMULATE_DQ, "accumulate.d<input>": ACCUMULATE}.items():
        support = [_support(target, name) for target in TARGETS]
        outer = [phase for phase in key.phases if whole_of(phase) not in key.phases]
        phases = "all" if len(outer) == 3 else ", ".join(outer)
        shown = f"`{name}`"
        rows.append(
            (shown, _allowed(name, key), _default(name, key), phases, *support, meanings.get(shown, ""))
        )
    return table(rows)


def _support(target: str, name: str) -> str:
    if name not in PROBES:
        return "with gradients"
    honoured = {
        label: _compiles(target, _changes(setting), setting) for label, setting in PROBES[name].items()
    }
    if all(honoured.values()):
        return "yes"
    return ", ".join(_coded(label) for label, ok in honoured.items() if ok) or "no"


def _coded(label: str) -> str:
    """Shows the value of a key as code, and what is said of it as words."""
    value, of, rest = label.partition(" of ")
    return f"`{value}`{of}{rest}"


def _changes(setting: str) -> Mapping[str, str]:
    """Returns the statements that an attention has to have for a setting to mean something."""
    if "backward" in setting:
        return {"more": "grad q, k, v"}
    if "lists" in setting:
        return _OF_EIGHT_HEADS
    return _LATENT if "tile.d = 256" in setting else {}


def _allowed(name: str, key: Key) -> str:
    return "see [below](#the-softmax-key)" if name == "softmax" else key.allowed


def _default(name: str, key: Key) -> str:
    if name == "tile.d":
        return "`D`"
    if name == "loops":
        return "`[q, kv]`; backward `[kv, q]`"
    return f"`{_spelled(key.default)}`"


def _spelled(value: Value) -> str:
    if isinstance(value, Choice):
        return value.name
    return str(value).lower() if isinstance(value, bool) else str(value)


def limits() -> str:
    """The table of limits."""
    return table(
        [
            ("limit", ""),
            ("---", "---"),
            ("characters of a file", f"{MAX_CHARACTERS:,}"),
            ("lines of a file; its words, numbers and signs", f"{MAX_TOKENS:,}; {MAX_TOKENS:,}"),
            ("levels of nesting of an expression or block", f"{MAX_DEPTH}"),
            ("characters of a name; digits of a number", f"{MAX_NAME}; {MAX_DIGITS}"),
            ("an expression, lets and defs expanded", f"{MAX_NODES:,} operations, {MAX_LEVELS} levels"),
            ("calls of defs that an attention expands to", f"{MAX_CALLS:,}"),
            ("integers", "64 bits; constants 62"),
            ("rows, keys, any other size", f"{SIZE:,}"),
            (
                "variants of an attention; of a file, for all its schedules",
                f"{MAX_VARIANTS:,}; {MAX_MODULES:,}",
            ),
            ("configs of a phase, before `where`", f"{MAX_CONFIGS:,}"),
            ("steps that an attention costs, or a variant of it for a target (E0510)", f"{MAX_STEPS:,}"),
            (
                "steps that a file costs (E0510)",
                f"{MAX_STEPS:,}, and {STEPS_PER_PIECE:,} for each variant and target after the first",
            ),
            ("head dimension", f"1 to {MAX_HEAD_DIM:,}"),
            ("rows of a page", f"1 to {MAX_PAGE:,}"),
        ]
    )


def platforms() -> str:
    """Which target runs on which GPU, and what systems are known."""
    gpus = [
        (name, *(state_of(target, capability) for target in TARGETS)) for name, capability in GPUS.items()
    ]
    head = ("GPU, on Linux", *(f"`{target}`" for target in TARGETS))
    systems = [(name, *states) for name, states in SYSTEMS.items()]
    first = table([head, ("---",) * len(head), *gpus])
    return first + "\n" + table([("system", "GPUs", "CPU"), ("---",) * 3, *systems])


def names() -> str:
    """What is a name of a generated module's interface, and a spec therefore cannot use for it."""
    kinds = {
        "attentions": GLOBALS,
        "inputs": READ,
        "inputs beside `grad`, and `d<input>` of each": WITH_GRADIENTS,
        "inputs beside `loops = [kv, q]`": KEYS_FIRST,
        "inputs of decode schedules": DECODING,
        "inputs of schedules for `cuda.sm_90a`": TAKING_TILES,
        "inputs of an attention with several schedules": {"schedule"},
    }
    rules = (f"- {kind}: {_listed(words)}" for kind, words in kinds.items())
    return "\n".join(["- attentions and inputs: names that start with `_`", *rules])


def _listed(words: Set[str]) -> str:
    shown = sorted(words - RESERVED.keys(), key=lambda word: (word.lower(), word))
    return ", ".join(f"`{word}`" for word in shown)


def definitions() -> str:
    """The prelude, as it is shipped."""
    text = (ROOT / "grammar" / "prelude.attn").read_text(encoding="utf-8")
    return f"```attn\n{text[text.index('# ---') :]}```\n"


# --- diagnostics --------------------------------------------------------------------------------------------

GOLDEN = ROOT / "tests" / "golden" / "diagnostics"
FLEX_GOLDEN = ROOT / "tests" / "golden" / "flex"
_GROUPS = {
    "E01": "Syntax",
    "E02": "Names",
    "E03": "Types, shapes and roles",
    "E04": "Schedules",
    "E05": "Limits",
    "E06": "Resources and targets",
    "E09": "Mods of FlexAttention",
    "W02": "Warnings: names",
    "W07": "Warnings and notes: masks",
    "W08": "Warnings: schedules and gradients",
}
_HEAD = """\
# Diagnostics

Every message of the compiler has a code. A code keeps its meaning for ever. `attnc check` prints messages as
shown here, `attnc check --json` as data. Each example is the first message about a spec that the tests keep.

This page is written by `pytest tests/test_docs.py --update-golden`.
"""


def diagnostics_page() -> str:
    """All of docs/diagnostics.md."""
    parts = [_HEAD]
    group = ""
    for code, info in CODES.items():
        if code[:3] != group:
            group = code[:3]
            parts.append(f"\n## {_GROUPS[group]}\n")
        parts.append(f"\n### {code}\n\n**{info.title}.** {escaped(info.explanation)}\n")
        example = _example(code)
        if example:
            parts.append(f"\n```text\n{example}```\n")
    return "".join(parts)


def _example(code: str) -> str:
    """The first message with this code among the golden ones; empty if there is none."""
    for path in sorted((*GOLDEN.glob(f"{code}_*.txt"), *FLEX_GOLDEN.glob(f"{code}_*.txt"))):
        messages = re.split(
            r"^(?=(?:error|warning|note)\[)", path.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
        for message in messages:
            if f"[{code}]" in message.split(":", 1)[0]:
                return message.replace(f"{code}_", "")
    return ""


def escaped(text: str) -> str:
    """Text without Markdown's own marks."""
    return re.sub(r"([*_<>])", r"\\\1", text)
