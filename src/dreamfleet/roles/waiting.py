"""What an actor waits for, in words for the person."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dreamfleet.config import RunConfig

_NAMED = 8


def actor_waits(
    args: RunConfig,
    silent: Mapping[int, float],
    observations: int,
    replay: Mapping[str, float],
    backlog: int,
) -> str:
    """Why there are no steps, if there are none; empty if the actor does not wait.

    Args:
        args: Which environments there are, and how many make a batch.
        silent: Seconds since the last observation of each environment that is known.
        observations: How many wait for the next policy call.
        replay: Statistics of the client that sends steps to the replay.
        backlog: Calls of that client that may be unanswered.
    """
    if replay["inflight"] and not replay["connected"]:
        return f"the actor has no connection to the replay at {args.replay_addr}"
    if replay["inflight"] >= backlog:
        return f"the actor waits for the replay to take {replay['inflight']:g} batches of steps"
    reasons = []
    if 0 < observations < args.policy_batch and args.actor_wait > args.log_every:
        reasons.append(
            f"the actor waits for a full batch: it has {observations} of {args.policy_batch} "
            f"observations, and uses a smaller batch after {args.actor_wait:g} s"
        )
    unknown = [envid for envid in range(args.all_envs) if envid not in silent]
    if len(unknown) > observations:
        reasons.append(f"no observation from {_names(unknown)} yet")
    late = {envid: age for envid, age in silent.items() if age > args.log_every}
    # Environments whose observations wait are not late. Which ones they are is not known here.
    count = len(late) - max(0, observations - len(unknown))
    if count > 0:
        some = "" if count == len(late) else f"{count} of "
        seconds = min(late.values())
        reasons.append(f"no observation from {some}{_names(late)} for {seconds:.0f} s or more")
    return "; ".join(reasons)


def _names(envids: Collection[int]) -> str:
    ids = sorted(envids)
    text = ", ".join(map(str, ids[:_NAMED])) + (" ..." if len(ids) > _NAMED else "")
    return f"environment {text}" if len(ids) == 1 else f"{len(ids)} environments ({text})"
