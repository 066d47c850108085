from .claim import run_claims

__all__ = ["run_claims"]
