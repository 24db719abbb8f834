"""Failure points in docs/states.md, from the list of points."""

from blockrelay.failpoints import FAILURES, POINTS
from docs.generate.tables import table

_HEAD = """
## Failure points

A named point precedes and follows every effect that a process has on the world outside it. A test, or a person who
wants to see it happen, can make the process die there, sleep, lose its Redis or wait:

<!-- not run: a worker that dies; `make faults` runs every point -->
```sh
BLOCKRELAY_FAILPOINT=worker.after_commit:kill@3 make up
BLOCKRELAY_FAILPOINT=worker.before_claim:delay=0.5@2,scheduler.after_plan:raise make up
```

The first one kills every worker at its third COMMIT, when the script has run and no process has heard of it yet.

The form is `<point>:<action>[=<seconds>][@<passage>]`, several separated by commas. Each happens once per process of
that role, when it passes the point for the `<passage>`-th time (default: the first), and leaves a `FAILPOINT` line in
the log. A name that does not exist ends the process at start with the list of those that do. Without the setting a
point costs one look at an empty dictionary, once per step or call.

`worker.before_compute:kill#77` happens whenever token 77 is among those that are computed, again and again: a poisonous
request, which kills its workers.

| action | what happens |
|---|---|
| `kill` | SIGKILL to the process |
| `stop` | SIGSTOP to the process, until it gets SIGCONT: it may come back after it was declared dead |
| `raise` | Redis is lost: before = the command did not run, after = its reply was lost. At `compute` the batch fails |
| `delay=S` | the thread sleeps for S seconds |

### The points

"""
_TAIL = """
`make faults` runs every role through every point once, cuts and slows the network between each service and each Redis,
and fills the disk: every answer must be that of the undisturbed run, and nothing may stay reserved or queued
(`tests/faults/`).

`BLOCKRELAY_INJECT_NUMERICS=new` makes a worker compute other bits (as exactly) under a numerics id that ends in `-new`,
as after an upgrade.
"""
#: What each effect is; those of scripts are the calls of the script of that name.
_EFFECTS = {
    "read": "a read of token logs",
    "event": "events go to a client",
    "register": "the worker enters the registry",
    "announce": "the worker says that it is ready",
    "receive": "rows and jobs are read and not yet deleted",
    "page_get": "a look into the page store",
    "compute": "one batch",
    "page_put": "a page goes to the page store",
    "forward": "rows go to the next stage",
    "early_job": "tokens go to the first stage before their COMMIT",
    "result": "tensor outputs are stored",
    "spawn": "a child process is started",
}


def points() -> str:
    """Returns the second half of the page."""
    moments: dict[tuple[str, str], list[str]] = {}
    for point in POINTS:
        role, _, name = point.partition(".")
        moment, _, effect = name.partition("_")
        moments.setdefault((role, effect), []).append(moment)
    rows = [
        (
            role,
            ", ".join(f"`{role}.{moment}_{effect}`" for moment in found),
            _EFFECTS.get(effect, f"a call of the script {effect.upper()}"),
            "yes" if FAILURES[f"{role}.{found[0]}_{effect}"] is not None else "no",
        )
        for (role, effect), found in sorted(moments.items(), key=lambda item: item[0][0])
    ]
    return f"{_HEAD}{table(('role', 'points', 'effect', '`raise` is possible'), rows)}{_TAIL}"
