"""Bugs planted where Hopper's consumers read random numbers that a warpgroup has drawn for them."""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="numbers of one run of keys for both",
        attention="hopper_dropped",
        story="a load had the words of one run of sixteen keys",
        anchor="permute_bytes(found.words[run][x], 0, turn)",
        patch="permute_bytes(found.words[0][x], 0, turn)",
    ),
    HopperBug(
        name="numbers in the order in which they are drawn",
        attention="hopper_dropped",
        story="a thread has columns 2 t and 8 + 2 t, whose words are not neighbours",
        anchor="drawn_words.words[run][1] = x[i + run][2 + half];",
        patch="drawn_words.words[run][1] = x[i + run][1 + half];",
    ),
    HopperBug(
        name="numbers given back while lanes read them",
        attention="hopper_dropped",
        story="one lane arrives for its warp, behind its own loads",
        anchor="__syncwarp(); mbarrier_arrive_if(barrier_of(base, DRAWN_EMPTY, drawn.index), lane == 0);",
        patch="mbarrier_arrive_if(barrier_of(base, DRAWN_EMPTY, drawn.index), lane == 0);",
    ),
)
