"""`python -m miniharness` and the `miniharness` command."""

from miniharness.cli import main
from miniharness.tools import cli  # noqa: F401  (adds its commands)

if __name__ == "__main__":
    main()
