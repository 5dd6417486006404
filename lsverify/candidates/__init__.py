"""Paths by others, as candidates: one module for each."""
