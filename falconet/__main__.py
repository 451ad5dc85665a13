"""`falconet`, and `python -m falconet` where the command is not on the PATH."""

from typing import NoReturn

from falconet import exits

with exits.at_once():  # the first 0.3 s of every command
    from falconet import cli


def main() -> NoReturn:
    """Run this process's command line."""
    try:
        cli.end(cli.main())
    except KeyboardInterrupt:  # a second one, while the first ends the process: `timeout -s INT` sends two
        exits.now(exits.INTERRUPTED)


if __name__ == "__main__":
    main()
