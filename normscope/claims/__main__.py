"""Print docs/claims.md."""

from normscope.claims.documentation import documentation
from normscope.claims.ledger import run_claims

if __name__ == "__main__":
    print(documentation(run_claims()), end="")
