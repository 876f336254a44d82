"""Who is stuck, from what the ranks say: no processes, no clock."""

import json
from collections.abc import Mapping

from weft.comm.watch import rules
from weft.comm.watch.rules import Picture, State, patience, sayings


def waits(key: str, number: int = 1, ranks: tuple[int, ...] = (0, 1), **issued: int) -> State:
    return State("waits", f"{key} {number}", {key: number, **issued}, key, number, ranks)


def stuck(states: Mapping[int, State | None], rank: int = 0, world: int = 2) -> list[int]:
    return list(Picture(states.get, range(world)).stuck_with(rank))


ELSEWHERE, FAILED, ENDED = (State(doing, doing, {}) for doing in ("elsewhere", "failed", "ended"))


def test_a_rank_that_waits_for_one_that_moves_is_not_stuck():
    assert stuck({0: waits("a"), 1: None}) == []


def test_a_rank_that_waits_for_what_all_have_begun_is_not_stuck():
    assert stuck({0: waits("a"), 1: waits("b", a=1)}) == [], "its transfer is under way"


def test_two_ranks_that_wait_for_each_other_are_stuck():
    states = {0: waits("a"), 1: waits("b")}
    assert stuck(states, 0) == stuck(states, 1) == [0, 1]
    assert sayings(states, Picture(states.get, range(2))) == {
        0: "a 1, which rank 1 never began",
        1: "b 1, which rank 0 never began",
    }


def test_a_rank_behind_stuck_ones_is_stuck_with_them_though_it_also_waits_for_one_that_moves():
    states = {0: waits("a"), 1: waits("b"), 2: waits("c", ranks=(1, 2, 3)), 3: None}
    assert stuck(states, 2, world=4) == [0, 1, 2]
    assert stuck(states, 0, world=4) == [0, 1], "for which nobody needs to know what the others do"


def test_a_circle_of_groups_that_overlap_is_found():
    states = {rank: waits(f"k{rank}", ranks=(rank, (rank + 1) % 4)) for rank in range(4)}
    assert stuck(states, world=4) == [0, 1, 2, 3]
    states[2] = None
    assert stuck(states, world=4) == []


def test_a_rank_outside_of_weft_is_stuck_only_if_all_the_world_is():
    states = {0: waits("a", ranks=(0, 1)), 1: ELSEWHERE, 2: None}
    assert stuck(states, world=3) == [], "rank 2 may be whom rank 1 waits for"
    assert stuck({**states, 2: ELSEWHERE}, world=3) == [0, 1, 2]
    assert stuck({**states, 2: waits("c", ranks=(2, 3)), 3: waits("d", ranks=(2, 3), c=1)}, world=4) == []


def test_who_left_by_an_exception_has_much_longer_than_who_waits_or_ended():
    for state in (FAILED, ENDED, ELSEWHERE):
        assert stuck({0: waits("a"), 1: state}) == [0, 1]
    assert patience([waits("a"), ENDED]) == rules.CERTAIN_S < patience([waits("a"), ELSEWHERE]) == rules.ELSEWHERE_S
    assert patience([ELSEWHERE, FAILED]) == rules.ABANDONED_S > 10 * rules.ELSEWHERE_S


def test_a_rank_that_ended_after_it_took_part_is_not_waited_for():
    assert stuck({0: waits("a"), 1: State("ended", "", {"a": 1})}) == []


def test_states_survive_the_store():
    state = waits("a", 3, b=2)
    assert State(*json.loads(json.dumps(state))) == state._replace(ranks=[0, 1])
