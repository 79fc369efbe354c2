"""What an actor waits for, in words for the person."""

from __future__ import annotations

from collections.abc import Mapping

from dreamfleet.config import RunConfig

_NAMED = 8


def actor_waits(
    args: RunConfig,
    silent: Mapping[int, float],
    observations: int,
    replay: Mapping[str, float],
    backlog: int,
) -> str:
    """Why there are no steps, if there are none.

    Args:
        args: Which environments there are, and what a batch is.
        silent: Seconds since each environment known was heard of.
        observations: How many wait for the next policy call.
        replay: Statistics of the client that sends steps to the replay.
        backlog: Calls of it that may be unanswered.
    """
    if replay["inflight"] and not replay["connected"]:
        return f"the actor has no connection to the replay at {args.replay_addr}"
    if replay["inflight"] >= backlog:
        return f"the actor waits for the replay to take {replay['inflight']:g} batches of steps"
    reasons = []
    if 0 < observations < args.policy_batch and args.actor_wait > args.log_every:
        reasons.append(
            f"the actor waits for a full batch: it has {observations} of {args.policy_batch} "
            f"observations, and makes do with them after {args.actor_wait:g} s"
        )
    unheard = [envid for envid in range(args.all_envs) if envid not in silent]
    if len(unheard) > observations:
        reasons.append(f"no word from {_names(unheard)} yet")
    late = {envid: age for envid, age in silent.items() if age > args.log_every}
    # Those whose observations wait are not to blame; which ones they are is not known here.
    absent = len(late) - max(0, observations - len(unheard))
    if absent > 0:
        some = "" if absent == len(late) else f"{absent} of "
        reasons.append(
            f"{some}{_names(late)} did not answer for {min(late.values()):.0f} s or more"
        )
    return "; ".join(reasons)


def _names(envids: list[int] | Mapping[int, float]) -> str:
    ids = sorted(envids)
    text = ", ".join(map(str, ids[:_NAMED])) + (" ..." if len(ids) > _NAMED else "")
    return f"environment {text}" if len(ids) == 1 else f"{len(ids)} environments ({text})"
