"""The script `load-users`: which pods it makes read their users again, and its error when one does not."""

import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.project import ROOT

LOAD_USERS = ROOT / "deploy" / "k8s" / "load-users"
ONE_EACH = {"redis-control": ["control-0"], "redis-payload": ["payload-x"], "sentinel": []}
#: `kubectl`: pods by component, and each shows the file of its server as the Secret has it.
STAND_IN = """\
#!{python}
import sys
words, pods = sys.argv[1:], {pods!r}
assert words[:2] == ["--namespace", "models"], words
if "pods" in words:
    assert "status.phase=Running" in words
    component = words[words.index("--selector") + 1].rpartition("=")[2]
    print("\\n".join("pod/" + name for name in pods[component]))
elif "secret" in words:
    sys.stdout.write({files!r}[words[words.index("secret") + 1] + " " + words[-1]])
else:
    pod, command = words[words.index("exec") + 1], words[words.index("--") + 1 :]
    if command[0] == "sha256sum":
        print({digests!r}[command[1]], command[1])
    else:
        assert command[:2] == ["sh", "-c"] and command[2].endswith(" acl load")
        port = command[2].partition(" -p ")[2].split()[0]
        print(pod, port, file=open({log!r}, "a"))
        print("OK" if pod != {refuses!r} else "ERR no")
"""


def load(folder: Path, pods: Mapping[str, list[str]], *, refuses: str = "") -> tuple[int, str, list[str]]:
    """Exit code, what is printed, and each pod that was asked with its port."""
    log = folder / "asked"
    log.touch()
    files = {
        f"blockrelay-{of}-users jsonpath={{.data.{name}\\.acl}}": b64encode(name.encode()).decode()
        for of, name in (("redis", "control"), ("redis", "payload"), ("sentinel", "sentinel"))
    }
    names = ("control", "payload", "sentinel")
    digests = {f"/etc/redis/users/{name}.acl": sha256(name.encode()).hexdigest() for name in names}
    program = folder / "bin" / "kubectl"
    program.parent.mkdir()
    text = STAND_IN.format(
        python=sys.executable, pods=dict(pods), files=files, digests=digests, log=str(log), refuses=refuses
    )
    program.write_text(text)
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run([LOAD_USERS, "models"], env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


def test_one_server_of_each_kind(tmp_path: Path) -> None:
    code, said, asked = load(tmp_path, ONE_EACH)
    assert code == 0 and said.count("knows the users of the Secret") == 2
    assert asked == ["pod/control-0 6379", "pod/payload-x 6379"]


def test_replicas_and_sentinels_too(tmp_path: Path) -> None:
    """Users are loaded on every server: the next master would refuse a password that it does not know."""
    three = [f"control-{number}" for number in range(3)]
    sentinels = [f"sentinel-{number}" for number in range(3)]
    code, said, asked = load(tmp_path, {**ONE_EACH, "redis-control": three, "sentinel": sentinels})
    assert code == 0, said
    servers = [f"pod/{name} 6379" for name in (*three, "payload-x")]
    assert asked == [*servers, *(f"pod/{name} 26379" for name in sentinels)]


@pytest.mark.parametrize("component", ["redis-control", "redis-payload"])
def test_where_none_runs_it_says_so(tmp_path: Path, component: str) -> None:
    code, said, _ = load(tmp_path, {**ONE_EACH, component: []})
    assert code == 1 and f"no pod of {component} runs in models: name the namespace" in said


def test_a_server_that_refuses_is_named(tmp_path: Path) -> None:
    code, said, _ = load(tmp_path, ONE_EACH, refuses="pod/payload-x")
    assert code == 1 and "load-users: pod/payload-x has not read its users again: ERR no" in said
