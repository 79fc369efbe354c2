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


def test_what_an_agent_starts_from_is_said_once(tmp_path: Path) -> None:
    lines: list[str] = []
    news: list[str] = []
    config = small_run(tmp_path, logger_addr=resolve("ipc://{auto}"))
    with StatusLine(config, lines.append, news=news.append) as line:
        line._tell_start({})
        line._tell_start({"learner/start": "starting anew"})
        assert news == []
        start = "starting from there, loaded 2 of 9 entries: nets/encoder (2); not loaded: seed (7)"
        for _ in range(2):
            line._tell_start({"learner/start": start})
        log = tmp_path / "logs" / "agent.log"
        assert news == [f"The agent is {start}; every entry is in {log}"]
        line._tell_start({"learner/start": "going on from here"})
        assert news[1:] == ["The agent is going on from here"]
    assert lines == []  # a display leaves these out
