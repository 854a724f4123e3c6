"""Entropic optimal transport: solver, plans and KLOT. It imports no other part of the package."""
