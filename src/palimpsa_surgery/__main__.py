"""`python -m palimpsa_surgery` is the command line."""

from palimpsa_surgery.cli.main import run

run()
