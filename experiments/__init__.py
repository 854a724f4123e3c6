"""Commands that train, compare and reproduce, used from the checkout."""
