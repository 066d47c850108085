"""Print docs/claims.md."""

from normscope.claims.claim import run_claims
from normscope.claims.documentation import documentation

if __name__ == "__main__":
    print(documentation(run_claims()), end="")
