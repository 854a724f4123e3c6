"""Entropic optimal transport: solver, plans and KLOT; nothing here knows the rest."""
