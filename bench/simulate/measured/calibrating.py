"""What seconds of CPU do not tell: costs with which the simulated known systems do what the real ones did. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from bench.simulate.configurations import Configuration
from bench.simulate.costs import Costs
from bench.simulate.load import Figures, mean
from bench.simulate.system import simulate

#: Simulated seconds and those before them, how often each, and how often all is looked at again.
SECONDS, WARM_UP_S, SEEDS, ROUNDS = 15.0, 2.0, 2, 3
#: Halvings of what cores get done together; messages that a token of two stages waits for, one there and one back.
HALVINGS, HOPS = 5, 2

_Known = Sequence[tuple[Configuration, Figures]]


def calibrated(costs: Costs, one_worker: _Known, stages: _Known) -> Costs:
    """`costs` with what is seen of systems only, each taken from one figure of one of them. The known ones are in this
    order: under one client, ..., and last under many.

    - `hop_late`: the time between tokens of two stages under one client.
    - `pace` of all that computes: tokens per second of one worker under many. CPU was counted beside others, who have
      slowed it down already.
    - The last of `speeds`, what all cores get done together: tokens per second of two stages under many. Threads wait
      for a core where another is free, and caches are shared.
    - `cold`: the first token of one worker under one client.
    """
    (one, one_found), (many, many_found) = one_worker[0], one_worker[-1]
    (few_staged, few_staged_found), (full, full_found) = stages[0], stages[-1]
    for _ in range(ROUNDS):
        too_long = _said(few_staged, costs).between_tokens_s - few_staged_found.between_tokens_s
        costs = replace(costs, hop_late=min(costs.hop / 2, max(0.0, costs.hop_late + too_long / HOPS)))
    taken = costs
    pace, together = 1.0, costs.speeds[-1]
    for _ in range(ROUNDS):
        pace *= _said(many, costs).tokens_per_second / many_found.tokens_per_second
        least, most = 1.0, float(len(costs.speeds))
        for _ in range(HALVINGS if len(costs.speeds) > 1 else 0):
            together = (least + most) / 2
            costs = replace(taken.times(pace), speeds=(*taken.speeds[:-1], together))
            if _said(full, costs).tokens_per_second > full_found.tokens_per_second:
                most = together
            else:
                least = together
        costs = replace(taken.times(pace), speeds=(*taken.speeds[:-1], together))
    return replace(costs, cold=max(0.0, costs.cold + one_found.first_token_s - _said(one, costs).first_token_s))


def _said(configuration: Configuration, costs: Costs) -> Figures:
    several = [
        simulate(configuration.setup, configuration.load, costs, seconds=SECONDS, warm_up=WARM_UP_S, seed=seed).figures
        for seed in range(SEEDS)
    ]
    return mean(several)
