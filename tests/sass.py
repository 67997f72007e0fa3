"""What ptxas has made of the loops that multiply on tensor cores, read from machine code (SASS).

ptxas says what it spills and what it serialises (C75xx), but not where it puts a wait. On Hopper three of its
silent choices cost 5 to 20 % each: a wait for a product in front of the exponentials that should hide it,
sums that are sunk behind a branch and so come after the exponentials instead of among them, and addresses
of matrices that are kept in registers of threads, from where every HGMMA needs R2URs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

_FUNCTION = re.compile(r"^\.text\.([\w$]+):", re.M)
_LINE = re.compile(
    r"^(?:(?P<label>\.L_x_\d+):"
    r"|\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@(?P<guard>!?U?P\w+)\s+)?(?P<code>[A-Z][\w.]*)(?P<rest>[^;]*);)",
    re.M,
)
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_WAIT = re.compile(r"gsb0,\s*0x([0-9a-f]+)")
_COMMA = re.compile(r",(?![^\[]*\])")
_UNIFORM = re.compile(r"\bUR(\d+)")
_REGISTER, _PREDICATE = re.compile(r"R\d+"), re.compile(r"!?U?P(?:\d|T)")
#: Instructions that write a uniform register, besides those of uniform registers alone.
_TO_UNIFORM = ("R2UR", "S2UR", "VOTEU", "CS2UR", "REDUX")
#: A product's first matrix in registers, behind the sum.
_FIRST = re.compile(r"R\d+, R(\d+), gdesc")
#: How many registers of threads an instruction writes, of those that write several.
_SEVERAL = re.compile(r"\.(64|128|WIDE|M88\.[24])\b")
#: Instructions after which no instruction follows.
_ENDS = ("EXIT", "RET", "BRX", "JMP", "KILL")


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a kernel. code: with its modifiers, "MUFU.EX2"; target: the label that it may jump
    to.
    """

    code: str
    operands: str
    guarded: bool
    target: str | None

    def does(self, name: str) -> bool:
        return self.code == name or self.code.startswith(f"{name}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """An innermost loop with products on tensor cores; counts of instructions in its text.

    products, exponentials: HGMMA, MUFU.EX2; hidden: exponentials while a product is under way; moves: R2UR;
    sums: FADD, apart: those in basic blocks without exponentials; local: loads and stores of spilled values;
    untimely: products that are not between a wait at a named barrier and an arrival at one.
    """

    kernel: str
    products: int = 0
    exponentials: int = 0
    hidden: int = 0
    moves: int = 0
    sums: int = 0
    apart: int = 0
    local: int = 0
    untimely: int = 0


def loops(text: str) -> tuple[Loop, ...]:
    """Returns the innermost loops that multiply, of all kernels in nvdisasm's text, in the order
    of the text.
    """
    starts = list(_FUNCTION.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    found = []
    for match, end in zip(starts, ends, strict=True):
        graph = _Graph(text[match.end() : end])
        found += [graph.count(body, match[1]) for body in graph.multiplying()]
    return tuple(found)


def findings(loop: Loop, *, overlaps: bool) -> tuple[str, ...]:
    """Returns what is slow about a loop. overlaps: products are meant to run during the exponentials."""
    late = loop.exponentials - loop.hidden
    found = {
        f"{late} of {loop.exponentials} exponentials wait for the product that should hide them": overlaps
        and 2 * late > loop.exponentials,
        f"{loop.moves} R2UR for {loop.products} HGMMA: addresses are not uniform": loop.moves
        > 2 * loop.products,
        f"{loop.apart} of {loop.sums} FADD come after the exponentials and not among them": loop.exponentials
        >= 8
        and 2 * loop.apart > loop.sums,
        f"{loop.local} loads and stores of spilled registers": loop.local > 0,
    }
    return tuple(message for message, holds in found.items() if holds)


def unwritten(text: str) -> tuple[str, ...]:
    """Returns the instructions of nvdisasm's text that read a uniform register which nothing has written,
    kernel by kernel.

    ptxas of CUDA 12.8 makes such reads of the matrix descriptors of some kernels, without a word.
    """
    starts = [*_FUNCTION.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return tuple(
        one for match, end in zip(starts, ends, strict=True) for one in _unwritten(text[match.end() : end])
    )


def staying(text: str, *, is_lost: bool = False) -> tuple[str, ...]:
    """Returns the products in loops of nvdisasm's text, kernel by kernel, whose first matrix lies in
    registers that are written in front of the loop. is_lost: those of them whose registers are also written
    in the loop behind the product, and not restored: in the second turn they hold what is written there.

    ptxas of CUDA 12.8 to 13.0 makes such products, without a word, where registers are few. Kernels that mean
    to carry a matrix from turn to turn look alike.
    """
    starts = [*_FUNCTION.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return tuple(
        one
        for match, end in zip(starts, ends, strict=True)
        for one, lost in _Graph(text[match.end() : end]).staying()
        if lost or not is_lost
    )


def _unwritten(text: str) -> Iterator[str]:
    """Yields such instructions of a kernel, whose text is taken in order: what is written only behind a read,
    in a loop, is not there when it is read first. A MOV to a register of threads keeps what may be dead.
    """
    written: set[int] = set()
    for match in _LINE.finditer(text):
        if match["label"] is not None:
            continue
        code, operands = match["code"], [one.strip() for one in _COMMA.split(match["rest"])]
        results = 1 + sum(bool(_PREDICATE.fullmatch(one)) for one in operands[:2])
        writes = code.startswith("U") or code.split(".")[0] in _TO_UNIFORM
        made = operands[:results] if writes else []
        reads = {n for one in operands[len(made) :] for n in _uniform(one, operands, ".64" in code)}
        if reads - written and code != "MOV":
            yield f"{code} {match['rest'].strip()}"
        is_pair = ".64" in code or ".WIDE" in code
        written |= {n for one in made for n in _uniform(one, operands, is_pair)}


def _made(one: Instruction) -> Iterator[str]:
    """Yields the registers of threads that an instruction writes, but for sums of products."""
    operands = [part.strip() for part in _COMMA.split(one.operands)]
    if one.does("HGMMA") or one.code.startswith(("ST", "BAR", "SYNCS", "UTMA", "R2UR")):
        return
    made = next((part for part in operands[:2] if not _PREDICATE.fullmatch(part)), "")
    if _REGISTER.fullmatch(made):
        several = _SEVERAL.search(one.code)
        count = {"64": 2, "WIDE": 2, "M88.2": 2, "128": 4, "M88.4": 4}[several[1]] if several else 1
        yield from (f"R{int(made[1:]) + more}" for more in range(count))


def _restores(one: Instruction) -> bool:
    """Returns whether an instruction may bring back what was put aside, in memory or in other registers."""
    return one.code.startswith(("LDL", "MOV", "IMAD.MOV"))


def _uniform(operand: str, operands: Sequence[str], is_pair: bool) -> set[int]:
    """Returns the uniform registers of an operand: of a product of matrices two pairs, of which the first is
    not read if that matrix is in registers.
    """
    found = _UNIFORM.search(operand)
    if found is None:
        return set()
    first = int(found[1])
    if operand.startswith("gdesc"):
        return {*range(first + 2 if _REGISTER.fullmatch(operands[1]) else first, first + 4)}
    is_address = operand.startswith("[")  # in shared memory, of 32 bits
    return {first, first + 1} if (is_pair and not is_address) or operand.startswith("desc") else {first}


class _Graph:
    """Basic blocks of a kernel and where control goes from each."""

    def __init__(self, text: str) -> None:
        self.blocks: list[list[Instruction]] = [[]]
        labels: dict[str, int] = {}
        for match in _LINE.finditer(text):
            if match["label"] is not None:
                if self.blocks[-1]:
                    self.blocks.append([])
                labels[match["label"]] = len(self.blocks) - 1
                continue
            jump = _TARGET.search(match["rest"]) if match["code"].startswith("BRA") else None
            target = None if jump is None else jump[1]
            guarded = match["guard"] is not None or ".U.ANY" in match["code"] or ".DIV" in match["code"]
            one = Instruction(match["code"], match["rest"].strip(), guarded, target)
            self.blocks[-1].append(one)
            if target is not None or one.code.split(".")[0] in _ENDS:
                self.blocks.append([])
        self.next = [self._after(i, labels) for i in range(len(self.blocks))]

    def _after(self, i: int, labels: dict[str, int]) -> tuple[int, ...]:
        last = self.blocks[i][-1] if self.blocks[i] else None
        following = (i + 1,) if i + 1 < len(self.blocks) else ()
        if last is None:
            return following
        jumps = () if last.target is None or last.target not in labels else (labels[last.target],)
        stops = last.target is not None or last.code.split(".")[0] in _ENDS
        return jumps if stops and not last.guarded else (*following, *jumps)

    @cached_property
    def _before(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.blocks]
        for block, after in enumerate(self.next):
            for other in after:
                before[other].append(block)
        return before

    @cached_property
    def _dominators(self) -> list[set[int]]:
        """Finds of every block those that every way from the start to it goes through."""
        everything = set(range(len(self.blocks)))
        found = [{0}, *(everything for _ in self.blocks[1:])]
        changed = True
        while changed:
            changed = False
            for block in range(1, len(self.blocks)):
                ways = [found[other] for other in self._before[block]]
                now = {block} | (set.intersection(*ways) if ways else set())
                if now != found[block]:
                    found[block], changed = now, True
        return found

    def _loops(self) -> Iterator[frozenset[int]]:
        """Yields the natural loops: of every jump back to a block that dominates it, all that leads there."""
        for block, after in enumerate(self.next):
            for head in after:
                if head not in self._dominators[block]:
                    continue
                body, queue = {head, block}, [block] if block != head else []
                while queue:
                    for other in self._before[queue.pop()]:
                        if other not in body:
                            body.add(other)
                            queue.append(other)
                yield frozenset(body)

    def multiplying(self) -> list[list[int]]:
        """Returns the blocks of each innermost loop with an HGMMA, in the order of the text."""
        bodies = {
            body
            for body in self._loops()
            if any(one.does("HGMMA") for block in body for one in self.blocks[block])
        }
        inner = [body for body in bodies if not any(other < body for other in bodies)]
        return sorted(sorted(body) for body in inner)

    def staying(self) -> Iterator[tuple[str, bool]]:
        """Yields the products in loops whose first matrix stays in registers, and whether it is lost."""
        for body in self.multiplying():
            code = [one for block in body for one in self.blocks[block]]
            for at, one in enumerate(code):
                first = _FIRST.match(one.operands) if one.does("HGMMA") else None
                if first is None:
                    continue
                held = {f"R{int(first[1]) + more}" for more in range(4)}
                stay = held - {made for other in code[:at] for made in _made(other)}
                last = {made: other for other in code[at + 1 :] for made in _made(other)}
                if stay:
                    is_lost = any(x in last and not _restores(last[x]) for x in stay)
                    yield f"{one.code} {one.operands}", is_lost

    def count(self, body: Sequence[int], kernel: str) -> Loop:
        found, under_way, has_turn = Loop(kernel=kernel), 0, False
        for block in body:
            code = self.blocks[block]
            exponentials = sum(one.does("MUFU.EX2") for one in code)
            sums = sum(one.does("FADD") for one in code)
            for one in code:
                if one.does("HGMMA"):
                    untimely = found.untimely + (not has_turn)
                    found = replace(found, products=found.products + 1, untimely=untimely)
                    under_way += "gsb0" in one.operands
                elif one.does("BAR"):
                    has_turn = one.does("BAR.SYNC")
                elif one.does("WARPGROUP.DEPBAR") and (left := _WAIT.search(one.operands)):
                    under_way = min(under_way, int(left[1], 16))
                elif one.does("MUFU.EX2"):
                    found = replace(found, hidden=found.hidden + (under_way > 0))
            found = replace(
                found,
                exponentials=found.exponentials + exponentials,
                moves=found.moves + sum(one.does("R2UR") for one in code),
                sums=found.sums + sums,
                apart=found.apart + (sums if exponentials == 0 else 0),
                local=found.local + sum(one.does("LDL") or one.does("STL") for one in code),
            )
        return found
