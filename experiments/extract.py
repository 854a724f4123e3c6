"""Names the new form of this command."""

from experiments import moved

if __name__ == "__main__":
    moved.to("sotalign_jax.extract")
