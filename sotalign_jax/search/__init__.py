"""Encoders of raw pictures, texts and sounds, and search with trained models.

The commands of this package need the extra `extract`.
"""
