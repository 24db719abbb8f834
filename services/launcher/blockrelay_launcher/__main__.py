"""The entry point of the `blockrelay` command: `python -m blockrelay_launcher` and the script `blockrelay`."""

import os
import sys

from blockrelay.errors import UsageError
from blockrelay.exit_codes import UNUSABLE, complain
from blockrelay_launcher.other_services import become_at_once


def main() -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 unusable input, 130 interrupted."""
    try:
        become_at_once(sys.argv[1:], os.environ)
        from blockrelay_launcher.cli.main import main as run
    except KeyboardInterrupt:  # imports take seconds on a slow machine
        sys.exit(130)
    except UsageError as error:
        complain(error)
        sys.exit(UNUSABLE)
    run()


if __name__ == "__main__":
    main()
