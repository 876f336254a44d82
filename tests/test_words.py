"""Words of messages."""

from weft.words import choice_of, counted, listed


def test_a_number_has_its_noun_in_the_singular_or_the_plural():
    assert [counted(number, "rank") for number in (0, 1, 2, 2000)] == ["0 ranks", "1 rank", "2 ranks", "2,000 ranks"]
    assert [counted(number, "microbatch") for number in (1, 1.0, 2.5)] == ["1 microbatch"] * 2 + ["2.5 microbatches"]


def test_a_long_list_of_names_says_how_many_more_there_are():
    assert listed(["b", "a"]) == "b, a"
    assert listed(map(str, range(9)), 2) == "0, 1 and 7 more"


def test_a_misspelled_word_suggests_a_known_one_and_any_other_word_lists_them():
    assert choice_of("TRIAN", ["train", "eval"]) == "did you mean train?"
    assert choice_of("fly", ["train", "eval"]) == "choose from train, eval"
