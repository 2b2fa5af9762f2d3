"""`python -m fewstep` is the `fewstep` command."""

from fewstep.distill.cli import main

main()
