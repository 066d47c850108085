"""The statements of two papers about normalization, each as a function that tries to confirm and to refute it."""
