"""Which part of a parameter each tensor-parallel rank uses."""

from weft.moe.parts import spans_of, units_of


def test_ranks_share_units_or_divide_them_and_the_last_ranks_may_have_none():
    def of_four(units):
        return [units_of(units, 4, rank) for rank in range(4)]

    assert of_four(2) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert of_four(8) == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert of_four(5) == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_each_section_is_divided_apart_from_the_others():
    sections = [(2, 3), (4, 1)]
    assert [spans_of(sections, 2, rank) for rank in range(2)] == [[(0, 3), (6, 2)], [(3, 3), (8, 2)]]
