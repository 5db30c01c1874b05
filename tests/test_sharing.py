"""When requests gain by leaving blocks that they share."""

from vtoken.core.sharing import worth_leaving

TRUNK = [1, 2, 3, 4]


def test_two_whose_copies_take_less_than_the_blocks_they_share() -> None:
    assert worth_leaving({"a": TRUNK, "b": TRUNK}, dict.fromkeys(TRUNK, 2), {"a": 1, "b": 2}) == [["a", "b"]]


def test_as_many_blocks_as_before_are_no_gain() -> None:
    assert worth_leaving({"a": TRUNK, "b": TRUNK}, dict.fromkeys(TRUNK, 2), {"a": 2, "b": 2}) == []


def test_a_holder_that_cannot_leave_keeps_its_blocks_from_counting() -> None:
    references = {1: 3, 2: 3, 3: 3, 4: 2}
    assert worth_leaving({"a": TRUNK, "b": TRUNK}, references, {"a": 1, "b": 1}) == []
    assert worth_leaving({"a": TRUNK, "b": TRUNK}, references, {"a": 0, "b": 0}) == [["a", "b"]]


def test_groups_decide_for_themselves() -> None:
    shared = {"a": TRUNK, "x": [7, 8], "b": TRUNK, "y": [7, 8]}
    references = dict.fromkeys(TRUNK, 2) | {7: 2, 8: 2}
    assert worth_leaving(shared, references, {"a": 1, "b": 1, "x": 1, "y": 1}) == [["a", "b"]]


def test_who_shares_with_one_of_a_group_is_of_that_group() -> None:
    """a and b share a trunk, b and c the block behind it: all three or nobody."""
    shared = {"a": [1, 2], "c": [9], "b": [1, 2, 9]}
    references = {1: 2, 2: 2, 9: 2}
    assert worth_leaving(shared, references, {"a": 1, "b": 1, "c": 0}) == [["a", "c", "b"]]
    assert worth_leaving(shared, references, {"a": 1, "b": 1, "c": 1}) == []


def test_a_block_that_one_of_them_has_given_up_already() -> None:
    """Nothing was left alive for b in block 2: its references say so, and only a has it to leave."""
    assert worth_leaving({"a": [1, 2], "b": [1]}, {1: 2, 2: 1}, {"a": 1, "b": 0}) == [["a", "b"]]


def test_nobody() -> None:
    assert worth_leaving({}, {}, {}) == []
