"""``python -m mla``: the command line."""

from mla.cli import main

if __name__ == "__main__":
    main()
