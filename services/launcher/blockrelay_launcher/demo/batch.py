"""Runs `blockrelay demo --batch FILE`: answers all prompts of a file, in its order, with figures at the end."""

import json
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import ServiceUnavailable
from blockrelay_launcher.background import running_up
from blockrelay_launcher.client.resuming import Refused
from blockrelay_launcher.demo.answer import Answer, cancel, http_client, one_line, request_body, streamed, write
from blockrelay_launcher.demo.batch_file import Prompt
from blockrelay_launcher.demo.batch_report import Result, summarise
from blockrelay_launcher.tables import facts_table


def run_batch(
    model: Path, manifest: Manifest, prompts: Sequence[Prompt], *, stages: int, concurrency: int, as_json: bool
) -> int:
    """Answers all prompts, at most `concurrency` at once, prints the results and returns 1 if one failed, else 0.

    `model` is the block folder of `manifest`; it is served in `stages` stages. `prompts` must not be empty. Raises
    ServiceUnavailable if the system does not start.
    """
    results: list[Result] = []
    with running_up(model, stages, apart=True) as url, http_client() as http:
        began = time.monotonic()
        with closing(_Batch(url, http, manifest).results(prompts, concurrency)) as coming:
            for result in coming:
                results.append(result)
                write(_line(result.to_json()) if as_json else result.to_text())
        summary = summarise(results, time.monotonic() - began)
    if as_json:
        write(_line(summary.to_json()))
    else:
        Console().print(facts_table("what it took", summary.rows()))
    return 1 if summary.failed else 0


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


class _Abandoned(Exception):
    """The batch was ended early: no reader waits for the remaining answers."""


@dataclass(slots=True)
class _Batch:
    """The requests of a batch to one gateway."""

    url: str
    http: httpx.Client
    manifest: Manifest
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _under_way: dict[int, Answer] = field(default_factory=dict[int, Answer], init=False)

    def results(self, prompts: Sequence[Prompt], concurrency: int) -> Generator[Result, None, None]:
        """Yields the results in the order of the prompts, each as soon as it and all before it have ended.

        Ending the generator early (by Ctrl-C, for one) cancels all running requests.
        """
        with ThreadPoolExecutor(min(concurrency, len(prompts)), thread_name_prefix="prompt") as pool:
            try:
                yield from pool.map(self._result, range(len(prompts)), prompts)
            finally:
                self._over.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for answer in list(self._under_way.values()):
                    cancel(self.http, self.url, answer)  # its stream ends, which wakes the thread that reads it

    def _result(self, index: int, prompt: Prompt) -> Result:
        answer = self._under_way[index] = Answer(time.monotonic())
        error = None
        try:
            body = request_body(self.manifest, prompt.fields)
            with closing(streamed(self.http, self.url, body, answer, retrying=self._check_over)) as pieces:
                for _ in pieces:
                    self._check_over()
        except _Abandoned:
            cancel(self.http, self.url, answer)
            error = "abandoned"
        except (Refused, ServiceUnavailable, httpx.HTTPError) as refused:
            error = one_line(refused)
        finally:
            del self._under_way[index]
        return Result(
            index=index, prompt=prompt, answer=answer, total_s=time.monotonic() - answer.asked_at, error=error
        )

    def _check_over(self, why: str = "") -> None:
        if self._over.is_set():
            raise _Abandoned
