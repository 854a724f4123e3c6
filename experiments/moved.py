"""Notice of a command that has moved into the package."""

import sys
from typing import NoReturn


def to(name: str) -> NoReturn:
    """Prints the new name of a command and exits with status 2."""
    print(f"this command is now: python -m {name}", file=sys.stderr)
    sys.exit(2)
