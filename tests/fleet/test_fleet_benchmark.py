"""The fleet's benchmark runs; what it measures is for a quiet machine."""

from dreamfleet.benchmarks.fleet import run


def test_a_quick_run_measures_the_fleet_and_its_peer() -> None:
    fleet = run(quick=True)[0]
    assert fleet.value > 0
    assert fleet.peer_value is not None
    assert fleet.ratio == fleet.value / fleet.peer_value
