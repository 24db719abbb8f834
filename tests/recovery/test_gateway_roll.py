"""A roll of gateways under plain streams: nothing breaks, nothing differs, for clients that know nothing of it."""

import asyncio

from bench.scenarios.gateway_roll import LOOK_S, RunningGateway, roll
from tests.support.systems.system import StartSystem

STREAMS, TOKENS = 16, 200
#: Long enough for a balancer that looks every LOOK_S, on a machine that is busy.
LINGER_S = 8 * LOOK_S
#: Streams last for seconds: both gateways have some to let end when they listen no more.
SLOW = {"inject_speed": "0.05"}


def test_a_roll_breaks_no_plain_stream_of_openais_client(start_system: StartSystem) -> None:
    system = start_system(worker=SLOW)

    def another() -> RunningGateway:
        url, process = system.start_gateway(gateway_linger_s=str(LINGER_S))
        return RunningGateway(url, process)

    report = asyncio.run(roll([another(), another()], another, streams=STREAMS, tokens=TOKENS))
    assert not report.broken and not report.differing
    assert report.streams == len(report.stream_s) == STREAMS and report.short > 0
    assert max(report.gone_s) > LINGER_S + 1, "else no gateway had anything to let end"
    assert [gateway.wait(0) for gateway in system.gateways[:2]] == [0, 0]
