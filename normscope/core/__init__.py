"""What every part shares: magnitudes, brackets, data, errors."""
