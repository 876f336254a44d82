"""An itinerary predicts a pass from the one before, and is silent once it was wrong."""

from hypothesis import given
from hypothesis import strategies as st

from weft.fsdp.runtime.prefetch import Itinerary

orders = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def walk(itinerary: Itinerary, order: list[int]) -> list[list[int]]:
    """A pass through `order`; what was predicted after each unit."""
    itinerary.begin()
    predictions = []
    for unit in order:
        itinerary.visit(unit)
        predictions.append(list(itinerary.ahead()))
    return predictions


@given(orders)
def test_a_repeated_order_is_predicted_to_its_end(order):
    itinerary = Itinerary()
    assert walk(itinerary, order) == [[]] * len(order), "a first pass knows nothing"
    assert walk(itinerary, order) == [order[number + 1 :] for number in range(len(order))]


@given(orders, orders)
def test_after_a_wrong_turn_nothing_is_predicted_and_the_next_pass_knows_the_new_way(old, new):
    itinerary = Itinerary()
    walk(itinerary, old)
    for number, prediction in enumerate(walk(itinerary, new)):
        same = new[: number + 1] == old[: number + 1]
        assert prediction == (old[number + 1 :] if same else [])
    assert walk(itinerary, new) == [new[number + 1 :] for number in range(len(new))]


@given(orders)
def test_a_forgotten_record_predicts_nothing(order):
    itinerary = Itinerary()
    walk(itinerary, order)
    itinerary.forget()
    assert itinerary.latest == []
    assert walk(itinerary, order) == [[]] * len(order)


@given(orders)
def test_the_latest_pass_is_the_one_under_way_or_else_the_last(order):
    itinerary = Itinerary()
    walk(itinerary, order)
    assert itinerary.latest == order
    itinerary.begin()
    assert itinerary.latest == order
