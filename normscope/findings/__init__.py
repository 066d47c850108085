"""One kind of finding and one table of rules: for the doctor, for early warnings of a training, for checkpoints."""
