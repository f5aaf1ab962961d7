"""`python -m lemon_mlflow` is the `lemon` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
