"""One run of every claim but the long ones, for all tests that read it: what takes seconds, and measurements that take longer."""

import pytest

from normscope.claims.claim import Ledger, run_claims
from tests.claims.expected import LATE, VERDICTS


@pytest.fixture(scope="session")
def ledger() -> Ledger:
    """Every exact claim, and those measured ones that are quick."""
    return run_claims([id for id in VERDICTS if id not in LATE])


@pytest.fixture(scope="session")
def measurements() -> Ledger:
    """The measured claims that are not in `ledger`; for tests of the full suite."""
    return run_claims(LATE)
