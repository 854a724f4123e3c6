"""`align`, the path from arrays to an `Aligner` in one call."""

from __future__ import annotations  # help(align) shows ArrayLike instead of its ten members

from numpy.typing import ArrayLike

from sotalign_jax import checks, data, methods
from sotalign_jax import recipe as recipe_lib
from sotalign_jax.aligner import Aligner
from sotalign_jax.heads import Teacher
from sotalign_jax.progress import Progress


def align(
    pairs: tuple[ArrayLike, ArrayLike],
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    val: tuple[ArrayLike, ArrayLike] | data.Gallery | None = None,
    recipe: str = "default",
    method: str | methods.Method | None = None,
    teacher: str | Teacher | None = None,
    start: str | None = None,
    dim: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    unpaired_batch: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Aligner:
    """Aligns two modalities from few pairs and many unpaired embeddings.

    Fits a teacher on the pairs and refines it with the unpaired rows, then trains a head per
    modality on

        SigLIP(pairs) + alpha * KLOT(student affinity || teacher affinity) on the unpaired rows.

    Without x and y, training is supervised (SAIL). With only one of them, the pairs' own rows
    replace the other. If `val` is None and there are at least 100 pairs, a tenth of them is held
    out for validation, unless the teacher is fitted already. Training keeps its best step on
    validation. With the default recipe, the teacher of the pairs alone, the trained heads, or a
    mixture replaces the refined teacher if it is clearly better on validation. Without validation
    the result is a mixture. A sample of the unpaired rows is kept for calibrated retrieval.

    Args:
        pairs: Embeddings (pairs_x, pairs_y) of shapes [n, d_x] and [n, d_y]. Row i of one matches
            row i of the other.
        x: Unpaired embeddings of the first modality, shape [n_x, d_x].
        y: Unpaired embeddings of the second modality, shape [n_y, d_y].
        val: Matching embeddings (V_x, V_y) to select on, or a `Gallery`.
        recipe: Name of the defaults for arguments below that are None. "default" mixes the trained
            heads with a refined teacher. "paper" is the paper's recipe.
        method: A method with its options, such as `methods.SOTAlign(alpha=1e-3)`, or a name of
            `methods.METHODS`. By default SOTAlign, or SAIL without unpaired rows.
        teacher: A name of `recipe.TEACHERS`, or a fitted teacher. By default "refined_cca", or
            "cca" if `recipe` is "paper".
        start: "teacher" starts the heads at the teacher's projection, "random" at random, and
            "centred" at random on rows without their mean. By default "centred", or "random" if
            `recipe` is "paper". Only linear heads can start at a teacher, which must be linear too,
            such as "tuned_cca".
        dim: Width of the trained heads' features. By default 512, 1,024 if `recipe` is "paper", or
            the teacher's width if the heads start at it. A mixture adds the teacher's features.
        steps: Training steps.
        learning_rate: Peak of the learning rate.
        unpaired_batch: Unpaired rows per step. By default at most 22,768 on an accelerator and
            1,024 on a CPU.
        seed: Seed of all random choices.
        progress: True shows a progress bar.

    Returns:
        The aligner. Its `info` has the options and the validation score of every candidate.

    Raises:
        InputError: The arguments or the data cannot be used. The message names the argument.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> z = rng.normal(size=(300, 8)).astype(np.float32)
        >>> to_x, to_y = rng.normal(size=(8, 12)), rng.normal(size=(8, 10))
        >>> X, Y = (z @ to_x).astype(np.float32), (z @ to_y).astype(np.float32)
        >>> aligner = align((X[:50], Y[:50]), X[50:], Y[50:], steps=20, progress=False)
        >>> aligner.similarity(X[:5], Y[:5]).shape
        (5, 5)

    References:
        S. Roschmann, P. Krzakala et al., "SOTAlign: semi-supervised alignment of unimodal vision
        and language models via optimal transport", ICML 2026.
    """
    gallery = val if isinstance(val, data.Gallery) or val is None else data.gallery(*val)
    dataset = data.dataset(pairs, x=x, y=y, val=gallery)
    # Empty arrays are probably a mistake, and must not silently turn into supervised training.
    if not (x is None and y is None) and not (len(dataset.pool_x) or len(dataset.pool_y)):
        raise checks.InputError(
            "x or y must have rows, got none; pass unpaired rows, or neither argument to train on "
            "the pairs only"
        )
    method = recipe_lib.resolve_method(method)
    checks.whole(0, seed=seed)
    # A `Fitted` method selects nothing on validation, and a fitted teacher has seen all pairs.
    ready = isinstance(method, methods.Fitted) or isinstance(teacher, Teacher)
    if gallery is None and not ready:
        dataset = data.hold_out(dataset, seed=int(seed))
    resolved = recipe_lib.default(
        dataset,
        preset=recipe,
        method=method,
        teacher=teacher,
        start=start,
        dim=dim,
        steps=steps,
        learning_rate=learning_rate,
        unpaired_batch=unpaired_batch,
        seed=seed,
    )
    with Progress(resolved.train.steps, "align", show=progress) as bar:
        prepared = recipe_lib.prepare(resolved, dataset, observer=bar)
        return recipe_lib.train(resolved, prepared, observer=bar, progress=progress)
