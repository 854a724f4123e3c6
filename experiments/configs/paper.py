r"""Trains SAIL and SOTAlign at the paper's size: 10k pairs, 1M unpaired rows, batches of 32,768.

The embeddings are your own files. Row i of x matches row i of y:

    python -m experiments.main --config=experiments/configs/paper.py --workdir=runs/paper \
        --config.data.files.x=cc3m_dinov3.npy --config.data.files.y=cc3m_nvembed.npy \
        --config.data.files.val_x=... --config.data.files.val_y=... \
        --config.data.files.test_x=coco_dinov3.npy --config.data.files.test_y=coco_nvembed.npy \
        --config.data.files.test_x_of_y=coco_image_of_caption.npy

The paper's appendix uses epsilons of 0.05 and 0.01: pass `--config.sotalign.epsilon_star=0.01`.
"""

from experiments import launch, spec


def get_config(arg: str = "") -> spec.Spec:
    """Returns runs of SAIL and SOTAlign with the paper's settings."""
    changes = {
        "runs": {name: {"method": name} for name in ("sail", "sotalign")},
        "data.name": "files",
        "data.n_pairs": 10_000,
        "data.n_unpaired": 1_000_000,
    }
    return launch.switched(spec.Spec().change(changes), arg)
