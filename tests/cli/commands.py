"""`normscope`, as typed."""

from typer.testing import CliRunner, Result

from normscope.cli import app


def normscope(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))
