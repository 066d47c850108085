"""Certified upper bounds and witnessed lower bounds on the Lipschitz constant of a traced model."""
