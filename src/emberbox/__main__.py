"""`python -m emberbox`: the same as the command `emberbox`."""

from emberbox.cli.main import run

if __name__ == "__main__":
    run()
