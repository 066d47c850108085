"""Random programs of torch functions, written without a look at the rules, and a search for pairs that refute their bounds."""
