"""Two machines of one name are told apart, and so are two containers of one machine."""

import os
from pathlib import Path

from blockrelay.host.identity import host_name, host_tag, process_prefix


def machine(root: Path, boot: str) -> Path:
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text(f"{boot}\n")
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").write_text("")  # each file is another table of processes
    return root


def test_a_machine_a_container_and_a_restart_have_a_tag_of_their_own(tmp_path: Path) -> None:
    one, container = machine(tmp_path / "a", "boot-1"), machine(tmp_path / "b", "boot-1")
    before = host_tag(root=one)
    assert len({before, host_tag(root=container), host_tag(root=tmp_path)}) == 3
    (one / "proc/sys/kernel/random/boot_id").write_text("boot-2\n")
    assert host_tag(root=one) != before


def test_every_process_of_this_machine_knows_the_ids_of_the_others() -> None:
    assert host_tag() == host_tag() and host_name().endswith(f":{host_tag()}")
    assert process_prefix(os.getpid()).split(":")[1:] == [str(os.getpid()), host_tag()]
