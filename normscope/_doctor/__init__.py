"""The doctor: what is wrong with the way a model uses normalization, and how to mend it."""
