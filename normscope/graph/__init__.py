"""Tracing a model into a graph of named operations."""
