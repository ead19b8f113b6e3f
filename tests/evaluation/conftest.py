"""Settings for these tests: programs run a few times on a few numbers."""

import pytest

from tests.quick import quick_compilation


@pytest.fixture(scope="package", autouse=True)
def compile_fast():
    """Most of the time would be compilation."""
    with quick_compilation():
        yield
