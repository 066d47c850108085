"""Runs in the forms of other tools."""
