from .runner import load_experiment, run_experiment

__all__ = ["load_experiment", "run_experiment"]
