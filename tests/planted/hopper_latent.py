"""Bugs planted in Hopper's gradients of values that are columns of keys: what warpgroups hand each other."""

from __future__ import annotations

from tests.planted.bug import HopperBug

BUGS: tuple[HopperBug, ...] = (
    HopperBug(
        name="ds not waited for",
        attention="hopper_latent",
        file="backward_dk",
        story="the consumer of scores had made ds itself once",
        anchor="mbarrier_wait(barrier_of(base, DS_FULL, 0), parity);",
        patch="",
    ),
    HopperBug(
        name="p not waited for",
        attention="hopper_latent",
        file="backward_dq",
        story="p came with the scores once",
        anchor="mbarrier_wait(barrier_of(base, P_FULL, 0), parity);",
        patch="",
    ),
    HopperBug(
        name="Q given back before ds has multiplied it",
        attention="hopper_latent",
        file="backward_dk",
        story="the consumer of scores gave Q back with its scores, and multiplies it twice",
        anchor="wgmma_wait<0>(); mbarrier_arrive_if(barrier_of(base, Q_EMPTY, q.index), lane == 0); "
        "mbarrier_arrive_if(barrier_of(base, DO_EMPTY, q.index), lane == 0);",
        patch="mbarrier_arrive_if(barrier_of(base, Q_EMPTY, q.index), lane == 0); wgmma_wait<0>(); "
        "mbarrier_arrive_if(barrier_of(base, DO_EMPTY, q.index), lane == 0);",
    ),
    HopperBug(
        name="second columns of dk over the first",
        attention="hopper_latent",
        file="backward_dk",
        story="both consumers stored from the first column on",
        anchor="args.stride_dkn + 64 * FIRST_PANELS;",
        patch="args.stride_dkn;",
    ),
    HopperBug(
        name="factor of the score left out of ds",
        attention="hopper_latent",
        file="backward_dk",
        story="it was left to the end, where a sum of p^T do has none",
        anchor="gradients[j][i] *= 0.07142857142857142f;",
        patch="gradients[j][i] *= 1.0f;",
    ),
)
