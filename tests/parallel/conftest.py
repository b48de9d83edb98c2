"""The layouts run once for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.parallel.matrix import Matrix, run_matrix


@pytest.fixture(scope="package")
def matrix(request, tmp_path_factory) -> Matrix:
    """All layouts; where every selected test names one, those alone."""
    users = [item for item in request.session.items if "matrix" in getattr(item, "fixturenames", ())]
    parameters = [item.callspec.params if hasattr(item, "callspec") else {} for item in users]
    named = all("name" in chosen for chosen in parameters)
    return run_matrix(tmp_path_factory.mktemp("matrix"), {p["name"] for p in parameters} if named else None)
