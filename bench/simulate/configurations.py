"""Systems and loads: those that costs are taken from, and those that are predicted. Data."""

from dataclasses import dataclass

from bench.simulate.load import Lengths, Load
from bench.simulate.system import Setup
from blockrelay.host.cpu import cores
from blockrelay_worker.scheduling.micro_batches import Seat, groups_of

#: Drawn: requests of one length that begin together end together, for ever, and what is seen is how they began.
PROMPT, NEW, LONG_PROMPT = Lengths(16, 48), Lengths(32, 96), Lengths(192, 320)
#: Answers of the loads that costs are taken from: a request's part tells from a token's.
SHORT, LONG = Lengths(2, 6), Lengths(64, 128)
#: Clients at the ends of what is predicted: a cost is not followed beyond what it was measured at.
FEW, MANY = 1, 32
#: Of the capacity, where requests come at random.
BUSY = 0.6


@dataclass(frozen=True, slots=True)
class Configuration:
    """A system and what its clients do."""

    name: str
    setup: Setup
    load: Load


def closed(clients: int, prompt: Lengths = PROMPT, new: Lengths = NEW) -> Load:
    """So many clients, who wait for their answers."""
    return Load(prompt=prompt, new=new, clients=clients)


def staged() -> Setup:
    """Two stages on this host."""
    return Setup(workers=2, stages=2, groups=groups_of([Seat("here", cores(), 1)] * 2))


def known() -> tuple[list[Configuration], list[Configuration]]:
    """Of one worker and of two stages, what costs are taken from: under one client first, under many last."""
    one, two = Setup(), staged()
    return [
        Configuration("1 client", one, closed(FEW, new=LONG)),
        Configuration("1 client, short", one, closed(FEW, new=SHORT)),
        Configuration("1 client, long prompts", one, closed(FEW, LONG_PROMPT, SHORT)),
        Configuration("32 clients, short", one, closed(MANY, new=SHORT)),
        Configuration("32 clients", one, closed(MANY, new=LONG)),
    ], [
        Configuration("2 stages, 1 client", two, closed(FEW, new=LONG)),
        Configuration("2 stages, 32 clients", two, closed(MANY, new=LONG)),
    ]


def six(capacity: float) -> list[Configuration]:
    """What is predicted, then measured, where one worker gives `capacity` tokens a second."""
    one = Setup()
    random = Load(prompt=PROMPT, new=NEW, per_second=BUSY * capacity / NEW.mean)
    return [
        Configuration("4 clients", one, closed(4)),
        Configuration("16 clients", one, closed(16)),
        Configuration("8 clients, long prompts", one, closed(8, LONG_PROMPT)),
        Configuration("random arrivals, 60 %", one, random),
        Configuration("2 workers, 16 clients", Setup(workers=2), closed(16)),
        Configuration("2 stages, 8 clients", staged(), closed(8)),
    ]
