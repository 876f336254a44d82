"""Plans of random traces: what is used is here, what is alive together lies apart, bytes add up."""

from hypothesis import given
from hypothesis import strategies as st

from weft.layout.plan import GradientFacts, Limits, Plan, StageFacts, UnitFacts
from weft.layout.trace import Event, Trace
from weft.layout.walk import compile_plan

UNITS = 6


@st.composite
def steps(draw):
    """Facts of units, the traces of a forward and its backward, and limits."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=UNITS, max_size=UNITS))
    bundled = draw(st.booleans())
    facts = []
    for number, size in enumerate(sizes):
        stage = StageFacts(8 * size, 4 * size, 4 * size, shared=draw(st.booleans()))
        gradients = GradientFacts("ranks" if bundled else None, 4 * size, draw(st.booleans()), False, (stage,))
        bundle = tuple(range(2 * (number // 2), 2 * (number // 2) + 2)) if bundled else ()
        facts.append(UnitFacts(str(number), (128 * size,), 128 * size, bundle=bundle, gradients=(gradients,)))
    order = draw(st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=10))
    forward = [event for number in order for event in (Event("use", number), Event("done", number, 1))]
    backward = []
    for number in reversed(order):
        backward += [Event("use", number), Event("done", number)]
        if number not in [event.unit for event in backward if event.what == "ready"]:
            backward.insert(-1, Event("ready", number, 1))
    traces = {"forward": Trace("forward", tuple(forward)), "backward": Trace("backward", tuple(backward))}
    budget = draw(st.one_of(st.none(), st.integers(0, 40_000)))
    return facts, traces, Limits(budget, draw(st.sampled_from([0, 200])), draw(st.integers(1, 3)))


@given(steps())
def test_what_is_used_is_here(step):
    facts, traces, limits = step
    plan = compile_plan(traces, facts, limits)
    resident, weights = set(), 0
    for entry in plan.steps:
        for action in entry.actions:
            if action.what == "gather":
                resident |= set(action.units)
            elif action.what == "free":
                resident -= set(action.units)
        if entry.event.what == "use":
            assert entry.event.unit in resident
        assert entry.weights <= plan.peak_bytes["gathered weights"]
        weights = entry.weights
    assert not weights and not plan.steps[-1].gradients, "all is at rest at the end of a step"
    together = max(sum(facts[number].gathered[0] for number in here.gathered) for here in plan.alive)
    assert together <= plan.peak_bytes["gathered weights"], "memory is planned for all that is alive together"


@given(steps())
def test_each_gradient_is_reduced_once_and_packed_before(step):
    facts, traces, limits = step
    plan = compile_plan(traces, facts, limits)
    ready = {event.unit for event in traces["backward"].events if event.what == "ready"}
    packed, reduced = set(), []
    for action in (action for entry in plan.steps for action in entry.actions):
        if action.what == "pack":
            packed |= set(action.units)
        elif action.what == "reduce":
            assert packed.issuperset(action.units)
            reduced += action.units
    assert sorted(reduced) == sorted(ready)
    sent = sum(4 * facts[unit].gathered[0] // 128 for unit in ready)
    assert sent == sum(each.nbytes for each in plan.collectives if each.operation == "reduce-scatter")


@given(steps())
def test_a_plan_is_a_value(step):
    one, other = compile_plan(step[1], step[0], step[2]), compile_plan(dict(step[1]), list(step[0]), step[2])
    assert one == other and one.hash == other.hash and one.collectives == other.collectives


@given(steps())
def test_no_more_than_the_budget_is_gathered_ahead(step):
    facts, traces, limits = step
    plan = compile_plan(traces, facts, limits._replace(prefetch_bytes=0))
    if any(unit.bundle for unit in facts):
        return  # a bundle comes as a whole
    held = max(unit.gathered[0] for unit in facts)
    assert all(entry.weights <= 2 * held for entry in plan.steps), "the unit in use, and one that stays for the next"


def test_a_bundle_that_does_not_fit_into_the_budget_as_a_whole_is_not_gathered_ahead():
    bundles = [(), (1, 2), (1, 2), (3, 4), (3, 4)]
    facts = [UnitFacts(str(number), (100,), 100, bundle=bundle) for number, bundle in enumerate(bundles)]
    uses = tuple(Event(what, number) for number in range(5) for what in ("use", "done"))
    for budget, ahead in ((199, 0), (200, 200), (399, 200), (400, 400)):
        plan = compile_plan({"forward": Trace("forward", uses)}, facts, Limits(budget))
        assert plan.steps[0].weights == 100 + ahead


def plan_of(facts: list[UnitFacts], **events: str) -> Plan:
    """The plan of passes whose events are written as "use 0, done 0 1"."""

    def read(event: str) -> Event:
        what, *numbers = event.split()
        return Event(what, *map(int, numbers))

    traces = {kind: Trace(kind, tuple(map(read, text.split(", ")))) for kind, text in events.items()}
    return compile_plan(traces, facts, Limits())


def test_a_unit_whose_parameters_are_shared_is_held_as_long_as_the_one_that_shares_them():
    table, head, other = UnitFacts("table", (100,), 100), UnitFacts("head", (10,), 10, tied=(0,)), UnitFacts("", (), 0)
    plan = plan_of([table, head, other], forward="use 1, use 0, done 0, done 1")
    assert [step.weights for step in plan.steps] == [110, 110, 110, 0]
    plan = plan_of([table, head, other], schedule="use 2, named 2, ahead 1, use 1, done 1, done 2")
    assert [step.weights for step in plan.steps] == [110, 110, 110, 110, 0, 0], "gathered ahead together"


def test_backward_s_copy_of_weights_that_stayed_is_gathered_alone_and_what_no_backward_uses_goes_at_its_end():
    copies, plain = UnitFacts("0", (100,), 100, other_copy=(60, 7)), UnitFacts("1", (10,), 10)
    forward = "use 0, keep 0, done 0 1, use 1, keep 1, done 1 1"
    plan = plan_of([copies, plain], forward=forward, backward="use 0 1, done 0")
    assert [(each.units, each.nbytes) for each in plan.collectives] == [((0,), 100), ((1,), 10), ((0,), 60)]
    assert plan.peak_bytes["gathered weights"] == 117 and [step.weights for step in plan.steps][-2:] == [110, 0]
    plan = plan_of([copies, plain], forward="use 0, done 0 1, use 1, keep 1, done 1 1", backward="use 0 1, done 0")
    assert [(each.units, each.nbytes) for each in plan.collectives] == [((0,), 100), ((1,), 10), ((0,), 100)]


def test_buffers_of_gradients_are_open_from_the_moment_at_which_modules_may_write_to_them():
    stage = StageFacts(accumulating=80, traveling=40, inbox=40, shared=False)
    offered, written, narrow = (
        GradientFacts(None, 40, narrows, declared, (stage,))
        for narrows, declared in ((False, True), (False, False), (True, False))
    )
    facts = [UnitFacts("0", (10,), 10, gradients=(offered, written, narrow))]
    for offers, bytes_of_step in (
        ("offer 0 0, write 0 1, write 0 2", [40, 80, 160]),
        ("offer 0 1, write 0 -2, write 0 -3", [80, 160, 240]),
        ("write 0 -1, write 0 1, write 0 2", [80, 120, 200]),
    ):
        plan = plan_of(facts, forward="use 0, done 0 1", backward=f"use 0, {offers}, ready 0 1, done 0")
        assert [step.gradients for step in plan.steps][3:6] == bytes_of_step
        assert not plan.steps[-1].gradients


def test_a_table_of_a_plan_says_how_much_it_leaves_out():
    plan = plan_of([UnitFacts("", (10,), 10)], forward="use 0, keep 0, done 0 1")
    _, *lines = plan.table(2).splitlines()
    assert len(lines) == 3 and lines[-1] == "... 1 more" and "forward: use root" in lines[0]
    assert len(plan.table(3).splitlines()) == 4
