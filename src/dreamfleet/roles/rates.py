"""How acting, learning and the replay are held in step."""

from __future__ import annotations

from dreamfleet.config import RunConfig
from dreamfleet.replay import SamplesPerInsert

LOOK_AHEAD = 2
"""Batches that a learner requests before they are needed."""
_ROWS_ON_THEIR_WAY = 4  # from an actor at most: so many times the limiter's tolerance


def limiter_for(args: RunConfig) -> SamplesPerInsert:
    """The limiter of a run: `train_ratio` replayed steps for each step collected.

    The least size makes sure that there is a sequence to sample: with so many steps in so many
    streams at least one stream is long enough.
    """
    if args.offline:  # nothing is collected that learning could be held in step with
        return SamplesPerInsert(ratio=0.0, tolerance=1.0, minsize=1)
    return SamplesPerInsert(
        ratio=args.train_ratio / args.batch_length,
        tolerance=args.limiter_tolerance,
        minsize=max(args.host_batch, args.envs) * args.window,
        # As much as the learner may be ahead: one that keeps up is exactly where it should be.
        debt=args.limiter_tolerance if args.catch_up else None,
    )


def most_owed(args: RunConfig, fills: float = 1.0) -> int:
    """Updates that a run may be short of when it has made its steps, because nothing was trained
    before the replay held enough of them, which happened `fills` times, and because the replay
    takes the steps that are on their way without a wait."""
    limiter = limiter_for(args)
    on_their_way = (1 + _ROWS_ON_THEIR_WAY * args.actors) * limiter.tolerance
    held = limiter.ratio * (limiter.minsize + on_their_way) + limiter.debt
    return int(fills * held / args.host_batch) + LOOK_AHEAD
