"""One experiment a file: settings, trials, what the paper says, a judgement and plots."""
