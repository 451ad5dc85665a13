"""`falconet`, and `python -m falconet` where the command is not on the PATH."""

from typing import NoReturn

from falconet import exits

with exits.at_once():  # the first 0.3 s of every command
    from falconet import cli


def main() -> NoReturn:
    """Run this process's command line."""
    cli.end(cli.main())


if __name__ == "__main__":
    main()
