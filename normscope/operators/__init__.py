"""Norms of linear maps: certified from above, attained from below."""
