"""`python -m blockrelay_launcher` and the script `blockrelay`, which every image has: the command, where it can run."""

import sys


def main() -> None:
    """The command, or one line that says what is missing and exit code 2."""
    try:
        from blockrelay_launcher.cli.main import main as run
    except KeyboardInterrupt:  # imports take seconds on a slow machine
        sys.exit(130)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing.startswith("blockrelay"):
            raise
        sys.stderr.write(f"blockrelay: {missing} is not installed: pip install 'blockrelay[launcher]'\n")
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
