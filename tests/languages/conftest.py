"""The C library, which must exist in CI."""

import pytest

import c_api


@pytest.fixture(scope="session")
def library() -> c_api.Library:
    return c_api.required()
