"""Defines a new method, a frozen dataclass with a loss, and trains it with `align`.

python examples/new_method.py       # a minute on a CPU
"""

import dataclasses

import numpy as np

import sotalign_jax as sota
from sotalign_jax import methods


@dataclasses.dataclass(frozen=True)
class CentredInfoNCE(methods.Objective):
    """Trains on InfoNCE of the pairs, and pulls the means of the unpaired features together.

    Attributes:
        weight: Weight of the squared distance between the two means.
    """

    weight: float = 1.0

    @property
    def pools(self):
        """Returns the modalities whose unpaired rows the loss reads."""
        return "xy"

    def __call__(self, heads, batch, teacher, memory):
        """Returns the loss of pairs (a, b) and unpaired rows x, y, with metrics and memory."""
        f, g = heads.x(batch.a), heads.y(batch.b)
        infonce = sota.infonce(f, g, log_scale=heads.log_scale[...])
        means = heads.x(batch.x).mean(axis=0) - heads.y(batch.y).mean(axis=0)
        gap = (means**2).sum()
        return infonce + self.weight * gap, ({"infonce": infonce, "gap": gap}, memory)


photos = sota.data.photographs()
pairs = photos.image[:300], photos.text[:300]
unpaired = {"x": photos.image[300:470], "y": photos.text[470:]}  # from different photographs
for method in ("sail", CentredInfoNCE()):
    options = {"method": method, "steps": 60, "learning_rate": 2e-3}
    model = sota.align(pairs, **unpaired, **options, progress=False)
    _, found = model.search(photos.image[300:], photos.text[300:], k=10)
    recall = 100 * np.mean([row in rows for row, rows in enumerate(found)])
    print(f"{method}: R@10 {recall:.1f} % among 340 captions")

# To use the method from the command line, save the class in sotalign_jax/methods/ and add
# "centred": CentredInfoNCE() to METHODS there. `--config.method=centred` then trains it.
