"""Masters of a control Redis go under load, and every answer is compared; exit status 1 when something is wrong.

Without `--redis` and `--wait` both with 1 and 0, one after the other, and behind them both with 1 over TLS and as the
users of deploy/redis, where the redis-server has TLS.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.support.failover_drill.course import KINDS, run
from tests.support.redis.redis_server import find_binary, has_tls


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.failover_drill", description=__doc__)
    parser.add_argument("--redis", choices=list(KINDS), help="three servers and three Sentinels, or a cluster of six")
    parser.add_argument("--wait", choices=["0", "1", "2"], help="BLOCKRELAY_ACCEPT_REPLICAS; a cluster's have one each")
    parser.add_argument("--secured", action="store_true", help="only over TLS and as the users of deploy/redis")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each; default: 3")
    parser.add_argument("--requests", type=int, default=8, help="at once; default: 8")
    parser.add_argument("--seed", type=int, help="of requests and times; default: a new one")
    asked = parser.parse_args()
    seed = SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    kinds = [asked.redis] if asked.redis else list(KINDS)
    courses = [(kind, wait, False) for kind in kinds for wait in ([asked.wait] if asked.wait else ["1", "0"])]
    everything = not (asked.redis or asked.wait)
    if asked.secured or everything:
        secured = [(kind, asked.wait or "1", True) for kind in kinds]
        courses = secured if asked.secured else courses + secured
    if any(secured for *_, secured in courses) and not has_tls(find_binary()):
        _say(f"{find_binary()} has no TLS, NOT TESTED over TLS and with users: install redis-server")
        courses = [course for course in courses if not course[-1]]
    failed = 0
    for redis, wait, secured in courses:
        data = Path(tempfile.mkdtemp(prefix="br-failover-drill-"))
        seconds = 60 * asked.minutes
        verdict = run(redis, int(wait), secured=secured, seconds=seconds, seed=seed, requests=asked.requests, data=data)
        _say(f"seed {seed}: " + ", ".join(f"{name} {figure}" for name, figure in verdict.row.items()))
        for line in verdict.wrong[:20]:
            _say(f"wrong: {line}")
        if verdict.wrong:
            failed += 1
            _say(f"kept for a look: {data}")
        else:
            shutil.rmtree(data)
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
