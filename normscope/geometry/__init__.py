"""Spheres, quotients by symmetries, gradient flow, and how fast scale-free weights turn."""
