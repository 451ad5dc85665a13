"""`falconet`, and `python -m falconet` for machines where the command is not on the PATH."""

from falconet import codes, leaving

with leaving.at_once():  # the first 0.3 s of every command
    from falconet import cli


def main() -> int:
    """The command of this process's line; who interrupts it does not wait for Python to clear up behind torch."""
    code = cli.main()
    if code == codes.INTERRUPTED:
        leaving.now()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
