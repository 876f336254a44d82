"""A pass is predicted by the one before, what comes next is gathered ahead, and a wrong turn ends the prediction."""

from hypothesis import given
from hypothesis import strategies as st

from weft.fsdp.driver import Hold
from weft.layout.gathers import _RECORDS, GatherOrder
from weft.layout.trace import Event, Trace

HOLDER = Hold("a test")
orders = st.lists(st.integers(0, 5), min_size=1, max_size=8)


class Unit:
    """A unit that notes when it is gathered; nothing holds it longer than its use."""

    def __init__(self, number, log):
        self.number, self.log = number, log
        self.gathered_bytes = 1
        self.tied, self.holders, self.resident = (), [], False
        self.two_copies, self.backward = False, False

    def has_room(self):
        return True

    def choose_copy(self, backward):
        self.backward = backward

    def prefetch(self):
        if not self.resident:
            self.resident = True
            self.log.append(self.number)

    def acquire(self, holder):
        self.holders.append(holder)

    def release(self, holder):
        self.holders.remove(holder)

    def free(self):
        self.resident = False


def order_of(budget=None):
    log = []
    return GatherOrder([Unit(number, log) for number in range(6)], {}, budget), log


def walk(gathers, log, order, kind="forward"):
    """A pass through `order`; what is gathered at each use."""
    gathers.begin(kind)
    gathered = []
    for number in order:
        log.clear()
        unit = gathers._units[number]
        gathers.use(unit, HOLDER)
        assert unit.resident, "a unit that is used is here"
        gathered.append(list(log))
        gathers.done(unit, HOLDER, backward_follows=True)
    (gathers.end_forward if kind == "forward" else gathers.end_backward)()
    for unit in gathers._units:
        unit.free()
    return gathered


@given(orders)
def test_a_first_pass_gathers_each_unit_when_it_is_used_and_the_second_one_ahead(order):
    gathers, log = order_of()
    for number, came in zip(order, walk(gathers, log, order)):
        assert came in ([number], [])
    known = set()
    for position, came in enumerate(walk(gathers, log, order)):
        known.update(came)
        following = [number for number in order[position:] if number != order[position]][:1]
        assert {order[position], *following} <= known


@given(orders, orders)
def test_after_a_wrong_turn_nothing_is_gathered_ahead_and_the_next_pass_knows_the_new_way(old, new):
    gathers, log = order_of(budget=6)
    walk(gathers, log, old)
    for position, came in enumerate(walk(gathers, log, new)):
        if new[: position + 1] != old[: position + 1]:
            assert came in ([new[position]], [])
    assert gathers.traces["forward"].uses == tuple(new)
    assert bool(gathers.off_plan) == (new != old and new != old[: len(new)])
    first, *_ = walk(gathers, log, new)
    assert set(first) == set(new), "the budget holds all of them"


@given(orders)
def test_a_first_backward_is_the_forward_turned_round(order):
    gathers, log = order_of()
    walk(gathers, log, order)
    walk(gathers, log, order[::-1], "backward")
    assert not gathers.off_plan and gathers.traces["backward"].uses == tuple(order[::-1])


@given(orders)
def test_forgotten_records_predict_nothing(order):
    gathers, log = order_of()
    walk(gathers, log, order)
    gathers.forget()
    assert not gathers.traces
    assert all(len(came) <= 1 for came in walk(gathers, log, order))


@given(orders, st.integers(0, 6))
def test_no_more_bytes_than_the_budget_are_gathered_ahead(order, budget):
    gathers, log = order_of(budget=budget)
    for _ in range(3):
        for came, number in zip(walk(gathers, log, order), order):
            assert len([each for each in came if each != number]) <= budget


def test_a_gradient_that_is_taken_inside_of_a_forward_leaves_its_record_alone():
    gathers, _ = order_of()
    for _ in range(2):
        gathers.begin("forward")
        gathers.use(gathers._units[0], HOLDER)
        gathers.begin("backward", inside=True)
        gathers.use(gathers._units[0], HOLDER)
        gathers.end_backward()
        gathers.use(gathers._units[1], HOLDER)
        gathers.end_forward()
    assert gathers.traces["forward"].uses == (0, 1) and gathers.traces["backward"].uses == (0,)
    assert not gathers.off_plan


def test_what_a_schedule_names_is_gathered_behind_the_unit_in_use_in_the_copy_that_its_next_use_needs():
    gathers, log = order_of()
    used, ahead, with_copies, *_ = gathers._units
    with_copies.two_copies = True
    gathers.foresee(Trace("schedule", (Event("use", 0), Event("use", 1), Event("use", 2, 1))))
    gathers.use(used, HOLDER, [ahead, with_copies])
    assert log == [0, 1, 2] and with_copies.backward and not ahead.backward
    assert gathers.current.events == [("use", 0, 0), ("named", 0, 0), ("ahead", 1, 0), ("ahead", 2, 0)]
    gathers.done(used, HOLDER)
    assert not used.resident and gathers.stays(ahead) and gathers.stays(with_copies)


def test_what_is_known_of_earlier_traces_takes_no_more_and_more_memory():
    gathers, log = order_of()
    for number in range(2 * _RECORDS):
        walk(gathers, log, [number % 6, number // 6])
        assert len(gathers._ahead) <= _RECORDS
