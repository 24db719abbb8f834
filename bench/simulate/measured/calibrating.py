"""Adjusts costs that no seconds of CPU show, until simulated known systems have the figures of the real ones. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from bench.simulate.configurations import Configuration
from bench.simulate.costs import Costs
from bench.simulate.load import Figures, mean
from bench.simulate.system import simulate

#: Simulated seconds, seconds of warm-up before them, simulations of each system, and rounds of adjustment.
SECONDS, WARM_UP_S, SEEDS, ROUNDS = 15.0, 2.0, 2, 3
#: Steps of the bisection for the speed of all cores together; messages that a token of two stages waits for.
HALVINGS, HOPS = 5, 2

_Known = Sequence[tuple[Configuration, Figures]]


def calibrated(costs: Costs, one_worker: _Known, stages: _Known) -> Costs:
    """Returns `costs` with four of them adjusted, each to one figure of one known system.

    `one_worker` and `stages` have measured figures; the first of each is with one client, and the last with many.

    - `hop_late` is set by the time between tokens of two stages with one client.
    - All seconds of CPU are scaled by the tokens per second of one worker with many clients: they were counted while
      other processes slowed them down.
    - The last of `speeds`, that of all cores together, is set by the tokens per second of two stages with many clients.
      Threads may wait for a core while another is free, and cores share caches.
    - `cold` is set by the time to the first token of one worker with one client.
    """
    (one, one_measured), (many, many_measured) = one_worker[0], one_worker[-1]
    (few_staged, few_staged_measured), (full, full_measured) = stages[0], stages[-1]
    for _ in range(ROUNDS):
        too_long = _predicted(few_staged, costs).between_tokens_s - few_staged_measured.between_tokens_s
        costs = replace(costs, hop_late=min(costs.hop / 2, max(0.0, costs.hop_late + too_long / HOPS)))
    unscaled = costs
    pace, together = 1.0, costs.speeds[-1]
    for _ in range(ROUNDS):
        pace *= _predicted(many, costs).tokens_per_second / many_measured.tokens_per_second
        least, most = 1.0, float(len(costs.speeds))
        for _ in range(HALVINGS if len(costs.speeds) > 1 else 0):
            together = (least + most) / 2
            costs = replace(unscaled.times(pace), speeds=(*unscaled.speeds[:-1], together))
            if _predicted(full, costs).tokens_per_second > full_measured.tokens_per_second:
                most = together
            else:
                least = together
        costs = replace(unscaled.times(pace), speeds=(*unscaled.speeds[:-1], together))
    return replace(costs, cold=max(0.0, costs.cold + one_measured.first_token_s - _predicted(one, costs).first_token_s))


def _predicted(configuration: Configuration, costs: Costs) -> Figures:
    """Returns the mean figures of several simulations."""
    several = [
        simulate(configuration.setup, configuration.load, costs, seconds=SECONDS, warm_up=WARM_UP_S, seed=seed).figures
        for seed in range(SEEDS)
    ]
    return mean(several)
