"""Tests of KLOT against ott-jax, which the library itself does not need."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_klot import EPSILON, EPSILON_STAR, cosines, exact

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # from JAXopt, which ott-jax imports
    import ott
    from ott.solvers.linear import implicit_differentiation as implicit


IMPLICIT = implicit.ImplicitDiff(solver_kwargs={"rtol": 1e-12, "atol": 1e-12})


def ott_klot(k, k_star, **options):
    """Computes KL(P* || P) with the plans and derivatives of ott-jax."""

    def plan(k, epsilon):
        geometry = ott.geometry.geometry.Geometry(cost_matrix=-k, epsilon=epsilon)
        problem = ott.problems.linear.linear_problem.LinearProblem(geometry)
        return ott.solvers.linear.sinkhorn.Sinkhorn(**options)(problem).matrix

    p, p_star = plan(k, EPSILON), jax.lax.stop_gradient(plan(k_star, EPSILON_STAR))
    return jnp.sum(p_star * (jnp.log(p_star) - jnp.log(p)))


@pytest.mark.parametrize(
    "options",
    [
        {"implicit_diff": IMPLICIT, "threshold": 1e-13, "max_iterations": 3000},
        {"implicit_diff": None, "min_iterations": 0, "threshold": 0.0, "max_iterations": 600},
    ],
    ids=["implicit", "unrolled"],
)
@pytest.mark.filterwarnings("ignore:.*NormalCG:DeprecationWarning")
def test_klot_gradient_matches_ott(x64, options):
    k, k_star = cosines()
    loss = functools.partial(ott_klot, **options)
    value, gradient = jax.jit(jax.value_and_grad(loss))(k, k_star)
    ours, our_gradient = exact(k, k_star)
    np.testing.assert_allclose(ours, value, rtol=1e-8)
    difference = np.linalg.norm(our_gradient - gradient) / np.linalg.norm(gradient)
    assert difference < 1e-8
