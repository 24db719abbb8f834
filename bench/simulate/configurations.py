"""The systems and loads from which costs are measured, and those whose figures are predicted. Data."""

from dataclasses import dataclass

from bench.simulate.load import Lengths, Load
from bench.simulate.system import Setup
from blockrelay.host.cpu import cores
from blockrelay_worker.scheduling.micro_batches import WorkerCores, groups_of

#: Lengths are drawn at random: requests of one length that begin together would end together for ever.
PROMPT, NEW, LONG_PROMPT = Lengths(16, 48), Lengths(32, 96), Lengths(192, 320)
#: Answers of two lengths, so that the cost of a request can be told from the cost of a token.
SHORT, LONG = Lengths(2, 6), Lengths(64, 128)
#: The fewest and the most clients with which costs are measured; predictions stay between them.
FEW, MANY = 1, 32
#: The share of the capacity at which requests come where they come at random.
BUSY = 0.6


@dataclass(frozen=True, slots=True)
class Configuration:
    """A system and its load."""

    name: str
    setup: Setup
    load: Load


def closed(clients: int, prompt: Lengths = PROMPT, new: Lengths = NEW) -> Load:
    """Returns the load of `clients` clients, each of which waits for its answer before it sends the next request."""
    return Load(prompt=prompt, new=new, clients=clients)


def staged() -> Setup:
    """Returns a system of two stages on this host."""
    return Setup(workers=2, stages=2, groups=groups_of([WorkerCores("here", cores(), 1)] * 2))


def known() -> tuple[list[Configuration], list[Configuration]]:
    """Returns the configurations from which costs are measured: those of one worker, and those of two stages.

    In each list the first has one client, and the last has MANY.
    """
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
    """Returns the six configurations that are predicted and then measured.

    `capacity` is the tokens per second of one worker.
    """
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
