"""Callbacks for training frameworks."""
