"""`python -m ktserve` is the command `ktserve`."""

from ktserve.cli.main import main

main()
