"""Run a command that refuses its arguments, and read its error line."""

from collections.abc import Callable

import pytest

from mlx_h2o import cli


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that refuses its arguments; gives the line that it says."""

    def run(*arguments: object) -> str:
        try:
            status = cli.main([*map(str, arguments)])
        except SystemExit as error:
            status = error.code
        out, said = capsys.readouterr()
        assert status == 2 and said.count("\n") == 1, said
        assert "Prompt:" not in out
        return said

    return run
