"""The old name of experiments.main; --config=experiments/configs/compare.py compares all methods.

python -m experiments.compare --config=experiments/configs/compare.py --workdir=runs/compare
"""

from experiments import cli, main

if __name__ == "__main__":
    cli.run(main.main, choices=main.CHOICES)
