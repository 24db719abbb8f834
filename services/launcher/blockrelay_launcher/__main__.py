"""`python -m blockrelay_launcher` is the `blockrelay` command."""

from blockrelay_launcher.cli import main

if __name__ == "__main__":
    main()
