"""When the line of a run also says who waits for whom."""

from pathlib import Path

from fleet_parts import small_run

from dreamfleet.fleet.status import StatusLine
from dreamfleet.transport import resolve


def test_a_run_that_collects_may_take_a_while_until_it_learns(tmp_path: Path) -> None:
    said: list[str] = []
    config = small_run(tmp_path, logger_addr=resolve("ipc://{auto}"))
    with StatusLine(config, said.append) as line:
        for step in (0, 10, 20):
            line._explain({"step": step})
        assert said == []
        line._explain({"step": 30})  # too long a while
        assert len(said) == 1
        line._explain({"step": 40, "learner/updates": 1})
        line._explain({"step": 50, "learner/updates": 1})
        assert len(said) == 1
        line._explain({"step": 50, "learner/updates": 2})  # nobody steps
        assert len(said) == 2
    assert all(text.startswith("Waiting: ") for text in said)
