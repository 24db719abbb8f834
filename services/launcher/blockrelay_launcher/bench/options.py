"""The options of `blockrelay bench`. The module imports little, because the command line needs it for its help."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Annotated, ClassVar

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.host.cpu import check_threads, cores
from blockrelay_launcher.option_groups import flag, option, switch
from blockrelay_launcher.up_options.groups import ModelOptions

#: Prompt tokens after the shared prefix, and new tokens of such a request.
OWN_TOKENS, PREFIX_NEW = 16, 2
#: New tokens of the request of `--kv-cache` whose steps must not become slower.
LONG_NEW = 50


def _without_slash(url: str | None) -> str | None:
    return url and url.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(ModelOptions):
    """The options of `blockrelay bench`. `url` None starts a system of its own, with `stages` and `threads`."""

    TITLE: ClassVar = None
    url: Annotated[
        str | None, option("URL", "Measure this gateway instead of starting a system.", callback=_without_slash)
    ] = None
    requests: Annotated[str, option("N,N", "Numbers of requests at once, each measured.")] = "1,4,16"
    prompt: Annotated[str, option("N,N", "Prompt lengths in tokens, each measured.")] = "128"
    new: Annotated[int, option("N", "New tokens of each request.")] = 64
    rounds: Annotated[int, option("N", "Number of measured rounds; the median counts.", min=1)] = 3
    stages: Annotated[int, option("N", "Number of equal stages that the model is cut into.", min=1)] = 1
    threads: Annotated[
        int | None, option("N", "Threads per worker; default: all cores.", min=1, callback=check_threads)
    ] = None
    in_process: Annotated[bool, switch("Also measure the executor alone, without services.")] = True
    speculation: Annotated[bool, flag("--speculation", "Let workers draft tokens ahead.")] = False
    sampled: Annotated[
        bool, flag("--sampled", "Also measure sampled tokens (temperature 0.6, top-p 0.9) beside greedy ones.")
    ] = False
    prefix: Annotated[int, option("N", "Also time two requests that share their first N tokens; 0: not.", min=0)] = 0
    kv_cache: Annotated[bool, flag("--kv-cache", "Also time requests with and without the KV cache.")] = False
    memory: Annotated[bool, flag("--memory", "Also measure the workers' memory while they serve.")] = False
    roofline: Annotated[
        bool, flag("--roofline", "Also measure what memory and units give, and how near steps come to it.")
    ] = False

    @property
    def request_counts(self) -> tuple[int, ...]:
        """The numbers of requests at once. Raises UsageError if `requests` is no list of numbers."""
        return _numbers(self.requests, "--requests")

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """The prompt lengths in tokens. Raises UsageError if `prompt` is no list of numbers."""
        return _numbers(self.prompt, "--prompt")

    @property
    def worker_threads(self) -> int:
        """Threads of each worker: `threads`, else all cores."""
        return self.threads or cores()

    def check(self, given: Set[str]) -> None:
        """Raises UsageError for options that are wrong for every model, or that `url` excludes.

        `given`, the names of the parameters on the command line, is not used.
        """
        if min(self.request_counts) < 1:
            raise UsageError("--requests must be at least 1")
        if min(self.prompt_lengths) < 1:
            raise UsageError("--prompt must be at least 1 token")
        if self.new < 2:
            raise UsageError("--new must be at least 2: the time between tokens is measured")
        if self.url and (self.stages > 1 or self.threads or self.memory or self.speculation or self.roofline):
            raise UsageError(
                "--stages, --threads, --speculation, --memory and --roofline are for a system of its own: leave them "
                "out with --url"
            )

    def check_for(self, folder: BlockFolder) -> None:
        """Raises UsageError for options that cannot be measured with the model of `folder`."""
        context, prompt = folder.model.max_position, max(self.prompt_lengths)
        if prompt + self.new > context:
            raise UsageError(
                f"--prompt and --new make {prompt + self.new} tokens, but the model's context is {context}"
            )
        if self.prefix and self.prefix + OWN_TOKENS + PREFIX_NEW > context:
            raise UsageError(
                f"--prefix {self.prefix} and {OWN_TOKENS + PREFIX_NEW} more tokens exceed the context of {context}"
            )
        if self.kv_cache and prompt + LONG_NEW > context:
            raise UsageError(f"--kv-cache adds {LONG_NEW} tokens to --prompt, which is beyond the context of {context}")
        if self.stages > folder.model.blocks:
            raise UsageError(f"--stages is {self.stages}, but the model has {folder.model.blocks} blocks")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Returns the numbers of a text such as `1,4,16`. Raises UsageError that names the option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} takes whole numbers with commas between them, not {text!r}") from None
