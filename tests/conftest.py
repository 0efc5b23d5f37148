"""What every run of the tests tells."""

import os
import secrets

import pytest

# Another twenty random products every time (tests/products.py), the same in all that this process starts.
os.environ.setdefault("PRODUCTS_SEED", str(secrets.randbelow(10**6)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to draw the same random products again."""
    terminalreporter.write_line(f"random products: PRODUCTS_SEED={os.environ['PRODUCTS_SEED']} draws the same")
