"""`falconet`, and `python -m falconet` for machines where the command is not on the PATH."""

from falconet import leaving

with leaving.at_once():  # the first 0.3 s of every command
    from falconet.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
