"""`python -m moet`."""

from moet.cli.main import main

main()
