"""One run of every claim but the long ones, for all tests that read it."""

import pytest

from normscope.claims.ledger import Ledger, run_claims


@pytest.fixture(scope="session")
def ledger() -> Ledger:
    return run_claims()
