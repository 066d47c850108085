"""The recorder: what normalization does while a model trains, written to a run directory at a stated cost."""
