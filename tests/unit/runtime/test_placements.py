"""What the router tells the gateway of the replicas."""

from rollout_service.runtime.placements import RoutedFleet, RoutedReplica


def test_room_is_what_other_gateways_leave_and_the_share_at_least():
    fleet = RoutedFleet()
    assert fleet.room(limit=10, share=5) == 0
    fleet.update({"a": RoutedReplica("ready", 3, others=2), "b": RoutedReplica("syncing", None, others=9)})
    assert fleet.room(limit=10, share=5) == 8 + 5


def test_replicas_that_take_no_calls_are_no_room():
    fleet = RoutedFleet()
    fleet.update({state: RoutedReplica(state, 3, others=0) for state in ("failed", "draining", "stale")})
    assert fleet.room(limit=10, share=1) == 10


def test_changes_of_the_load_are_told_apart_from_others():
    fleet, told = RoutedFleet(), list[bool]()
    fleet.listen(told.append)
    for replicas in (
        {"a": RoutedReplica("ready", 3, 0)},
        {"a": RoutedReplica("ready", 3, 5)},
        {"a": RoutedReplica("ready", 4, 5)},
        {"a": RoutedReplica("stale", 4, 5)},
        {"b": RoutedReplica("stale", 4, 5)},
        {},
    ):
        fleet.update(replicas)
    assert told == [True, False, True, True, True, True]
