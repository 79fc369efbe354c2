def test_an_end_allows_exactly_the_samples_that_are_missing() -> None:
    limiter = SamplesPerInsert(ratio=1.0, tolerance=10, minsize=1)
    limiter.insert(5)
    while limiter.can_sample():
        limiter.sample(2)
    limiter.finish(0)
    assert not limiter.can_sample(), "a run that is stopped gets no more batches"
    limiter.finish(6)
    limiter.finish(6)
    for _ in range(3):
        assert limiter.can_sample()
        limiter.sample(2)
    assert not limiter.can_sample()
