"""`python -m miniharness` and the `miniharness` command."""

from miniharness.cli import main

if __name__ == "__main__":
    main()
