"""Plans of random traces: what is used is here, what is alive together lies apart, bytes add up."""

from hypothesis import given
from hypothesis import strategies as st

from weft.layout.plan import GradientFacts, Limits, StageFacts, UnitFacts
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
