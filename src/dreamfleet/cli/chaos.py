"""`dreamfleet chaos --minutes N --seed S`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from dreamfleet.chaos.conductor import fleet_config, run_chaos
from dreamfleet.chaos.report import PromiseBroken
from dreamfleet.cli.console import say, write
from dreamfleet.errors import MissingExtraError
from dreamfleet.files import temporary_folder
from dreamfleet.settings import Count, CountOrZero, ZeroOrMore


def chaos(
    minutes: Annotated[float, Meta(gt=0, le=10_000)] = 30.0,
    seed: CountOrZero = 0,
    launcher: str = "local",
    faults: CountOrZero = 0,
    rest: ZeroOrMore = 4.0,
    agent: str = "dreamer",
    actors: Count = 1,
    replay_shards: Count = 1,
    eval_every: CountOrZero = 0,
    ports: bool = False,
    out: Path = Path("chaos"),
    goals: bool = False,
) -> None:
    """Run a fleet while everything goes wrong, and account for every step.

    A seeded schedule kills, stops and terminates the processes of a small fleet, also two at once
    and while they start, compile or save; cuts its connections and loses calls; sends requests that
    no server should take; and fills the disk. Then every stored step is audited. Ends with exit
    code 1 if a promise did not hold. Nothing outside of the fleet is touched.

    Args:
        minutes: How long there are faults; a tenth of that before and after is without.
        seed: Decides the faults and their order.
        launcher: Who starts the fleet: local, serial or ray. Threads of one process (serial) are
            not killed one by one.
        faults: End after so many faults; 0 for no end but that of the time.
        rest: Seconds between the recovery from a fault and the next one, on average.
        agent: Who acts and learns: dreamer, or random for a machine that is busy.
        actors: Servers that choose actions.
        replay_shards: Processes that the replay is spread over.
        eval_every: Steps between two rounds of evaluation, by an evaluator; 0 for none. Without it
            the evaluation environment calls the agent.
        ports: The environments call the agent over a port that asks for keys, as those of machines
            that join do; otherwise over a socket file, as those of this machine do.
        out: Directory for report.json, report.txt and report.png; and for the run itself, if a
            promise did not hold.
        goals: Also fail if a goal of speed is missed: recovery in 3 s (median) and 10 s (worst),
            70 % of the undisturbed steps, 200 faults in 30 minutes; for a quiet machine.
    """
    with temporary_folder("dreamfleet-chaos-") as folder:
        config = fleet_config(
            folder / "run",
            agent,
            seed=seed,
            launcher=launcher,
            actors=actors,
            replay_shards=replay_shards,
            eval_every=eval_every,
            **({"actor_addr": "tcp://127.0.0.1:{auto}"} if ports else {}),
        )
        report = run_chaos(config, seed, minutes, say, most=faults, rest=rest, keep=out / "run")
    write(out / "report.json", report.to_json())
    write(out / "report.txt", report.to_text())
    say(f"\n{report.to_text()}")
    try:
        report.draw(out / "report.png")
    except MissingExtraError as error:
        say(f"There is no picture: {error}")
    say(f"report         {out}")
    if broken := report.problems + (report.misses if goals else []):
        raise PromiseBroken(f"{len(broken)} promises did not hold. The first: {broken[0]}")
