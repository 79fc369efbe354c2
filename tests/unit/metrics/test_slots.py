"""Ids share few slots, and what belongs to one id never ends up with another."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamfleet.metrics.episodes import SlotTable


class Owner:
    """Keeps one value for each id, in an array."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.values = np.full(size, -1)
        self.table = SlotTable(size, grow=self.grow, clock=lambda: self.now)

    def grow(self, size: int) -> None:
        self.values = np.concatenate([self.values, np.full(size - self.values.size, -1)])

    def use(self, keys: list[int]) -> None:
        slots = self.table.slots(keys)  # first: it may replace the array
        self.values[slots] = keys


def test_ids_keep_their_slots() -> None:
    owner = Owner(4)
    first = owner.table.slots([7, 3])
    assert owner.table.slots([3, 7, 7]).tolist() == [first[1], first[0], first[0]]
    assert 7 in owner.table
    assert 8 not in owner.table
    assert sorted(owner.table.idle()) == [3, 7]


def test_no_id_is_no_slot() -> None:
    slots = Owner(4).table.slots([])
    assert slots.shape == (0,)
    assert slots.dtype == np.intp


def test_there_is_always_room_for_more() -> None:
    owner = Owner(2)
    owner.use(list(range(100)))
    assert owner.table.size == owner.values.size == 128
    assert owner.values[owner.table.slots(range(100))].tolist() == list(range(100))
    assert len(set(owner.table.slots(range(100)).tolist())) == 100


def test_ids_are_removed_and_their_slots_reused() -> None:
    owner = Owner(2)
    owner.use([1, 2])
    owner.now = 5.0
    owner.use([2])
    assert owner.table.idle() == {1: 5.0, 2: 0.0}
    slot = int(owner.values.tolist().index(1))
    owner.table.remove([1, 7])  # 7 never had one
    assert owner.table.slots([3]).tolist() == [slot]
    assert owner.table.size == 2


EVENTS = st.lists(
    st.one_of(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5)), max_size=40
)


@settings(deadline=None)
@given(EVENTS)
def test_no_two_ids_share_a_slot(events: list) -> None:
    """Lists are ids that are used, numbers are seconds of idleness after which ids are removed."""
    owner, used = Owner(1), {}
    for event in events:
        owner.now += 1
        if isinstance(event, list):
            owner.use(event)
            used |= dict.fromkeys(event, owner.now)
        else:
            gone = {key for key, then in used.items() if owner.now - then > event}
            owner.table.remove(gone)
            used = {key: then for key, then in used.items() if key not in gone}
    assert owner.table.idle().keys() == used.keys()
    idle = owner.table.idle()
    assert idle == {key: owner.now - then for key, then in used.items()}
    assert owner.values[owner.table.slots(sorted(used))].tolist() == sorted(used)
    assert owner.table.size <= 16
