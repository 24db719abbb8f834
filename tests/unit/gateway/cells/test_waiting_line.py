"""The order in which the kept requests of one key are tried."""

from blockrelay.auth.api_keys import Tenant
from blockrelay_gateway.cells import waiting_room


def test_one_that_does_not_fit_lets_those_behind_it_be_tried() -> None:
    line, patience = waiting_room._Line(), waiting_room.Patience(1.0, lambda: Tenant(name=""))  # pyright: ignore[reportPrivateUsage]
    kept = [waiting_room._Kept(0, number, 0.0, patience) for number in range(3)]  # pyright: ignore[reportPrivateUsage]
    for one in kept:
        line.enter(one)

    def first() -> list[int]:
        return [one.number for one in kept if one.is_first.is_set()]

    order: list[list[int]] = []
    for _ in range(5):
        order.append(first())
        line.pass_over(kept[order[-1][0]])
    assert order == [[0], [1], [2], [0], [1]]
    line.leave(kept[2])
    assert first() == [0]
