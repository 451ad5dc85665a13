"""`python -m falconet`, for machines where the command is not on the PATH."""

from falconet.cli import main

raise SystemExit(main())
