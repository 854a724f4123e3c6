"""`align` as a scikit-learn estimator, for pipelines, cross-validation and searches over settings.

The interface is that of `sklearn.cross_decomposition.CCA`: X and y are the embeddings of matching
rows. Unpaired rows are arguments of `fit`. Importing this module needs scikit-learn.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from sotalign_jax import alignment, checks, data, evaluation

try:
    from sklearn import base, utils
    from sklearn.utils import validation
except ModuleNotFoundError as error:
    raise checks.not_installed("scikit-learn", extra="sklearn") from error

# Other numbers become float32.
_FLOATS = (np.float32, np.float64, np.float16)


class SotalignEstimator(
    base.ClassNamePrefixFeaturesOutMixin, base.TransformerMixin, base.BaseEstimator
):
    """Aligns two modalities, see `align`.

    Args:
        recipe: Name of the defaults for arguments that are None.
        method: A method, or its name.
        teacher: A teacher, or its name.
        start: Start of the heads.
        dim: Width of the trained heads' features.
        steps: Training steps.
        learning_rate: Peak of the learning rate.
        unpaired_batch: Unpaired rows per step.
        random_state: Seed of all random choices, a `numpy.random.RandomState`, or None.
        verbose: True shows a progress bar.

    Attributes:
        aligner_: The `Aligner`, after `fit`.
        n_features_in_: Width of X.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X, Y = rng.normal(size=(20, 4)), rng.normal(size=(20, 3))
        >>> SotalignEstimator(steps=1, random_state=0).fit(X, Y).transform(X[:2]).shape[0]
        2
    """

    def __init__(
        self,
        *,
        recipe: str = "default",
        method: Any = None,
        teacher: Any = None,
        start: str | None = None,
        dim: int | None = None,
        steps: int | None = None,
        learning_rate: float | None = None,
        unpaired_batch: int | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.recipe = recipe
        self.method = method
        self.teacher = teacher
        self.start = start
        self.dim = dim
        self.steps = steps
        self.learning_rate = learning_rate
        self.unpaired_batch = unpaired_batch
        self.random_state = random_state
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        unpaired_X: Any = None,
        unpaired_y: Any = None,
        val: tuple[Any, Any] | data.Gallery | None = None,
    ) -> Self:
        """Trains an aligner.

        Args:
            X: Embeddings of the first modality, shape [n, d_x].
            y: Embeddings of the second modality, shape [n, d_y]. Row i matches row i of X.
            unpaired_X: Unpaired embeddings of the first modality.
            unpaired_y: Unpaired embeddings of the second modality.
            val: Matching embeddings to select on. By default a tenth of at least 100 pairs.

        Returns:
            The estimator.

        Raises:
            ValueError: The data cannot be used.
        """
        options = {"ensure_min_samples": checks.MIN_PAIRS, "ensure_min_features": 2}
        X, y = validation.validate_data(self, X, y, dtype=_FLOATS, multi_output=True, **options)
        if np.ndim(y) != 2:
            raise checks.InputError(
                f"y must be 2-D, one embedding per row, got shape {np.shape(y)}; y is the other "
                "modality and not a target"
            )
        settings = self.get_params(deep=False)
        del settings["random_state"], settings["verbose"]
        self.aligner_ = alignment.align(
            (X, _floats(y)),
            unpaired_X,
            unpaired_y,
            val=val,
            seed=self._seed(),
            progress=bool(self.verbose),
            **settings,
        )
        self._n_features_out = self.aligner_.heads.x.d_out
        return self

    def transform(self, X: Any, y: Any = None) -> Any:
        """Maps embeddings to unit features of the shared space.

        Args:
            X: Embeddings of the first modality.
            y: Embeddings of the second modality.

        Returns:
            The features of X, or the features of both if y is given.

        Raises:
            ValueError: The embeddings have other widths, or values that are not finite.
        """
        validation.check_is_fitted(self)
        X = validation.validate_data(self, X, dtype=_FLOATS, reset=False)
        if y is None:
            return self.aligner_.embed_x(X)
        return self.aligner_.embed_x(X), self.aligner_.embed_y(_floats(y))

    def score(self, X: Any, y: Any) -> float:
        """Computes the mean of R@1, R@5 and R@10 in both directions, between 0 and 1.

        Recall falls as the gallery grows, so compare scores of equal numbers of rows.

        Args:
            X: Embeddings of the first modality.
            y: Embeddings of the second modality. Row i matches row i of X.

        Returns:
            The score, of calibrated scores if the aligner uses them.

        Raises:
            ValueError: The embeddings cannot be used.
        """
        f, g = self.transform(X, y)
        bias_x, bias_y = None, None
        calibration = self.aligner_.calibration
        if self.aligner_.calibrated and calibration is not None:
            bias_x, bias_y = calibration.x(f), calibration.y(g)
        found = evaluation.retrieval(f, g, bias_x=bias_x, bias_y=bias_y)
        return float(np.mean([found[f"mean/R@{k}"] for k in evaluation.KS])) / 100.0

    def _seed(self) -> int:
        """Returns the seed of `align`."""
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(utils.check_random_state(self.random_state).randint(2**31 - 1))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = False
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


def _floats(y: Any) -> np.ndarray:
    """Converts numbers to floats, as `validate_data` does for X."""
    made = checks.array("y", y)
    return made if made.dtype.kind == "f" else made.astype(np.float32)
