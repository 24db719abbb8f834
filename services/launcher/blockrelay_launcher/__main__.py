"""`python -m blockrelay_launcher` and the script `blockrelay`, which every image has."""

import sys


def main() -> None:
    """The command."""
    try:
        from blockrelay_launcher.cli.main import main as run
    except KeyboardInterrupt:  # imports take seconds on a slow machine
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
