"""Canonical correlation analysis: moments, maps, the choice of options, and refinement by plans."""
