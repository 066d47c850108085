"""The command line: one file per command, beside models, examples and output, which they share; here exit codes and entry point.

Exit codes: 0 done, 1 something was found, 2 an error that the user can fix, 3 no certificate (`Refusal`), 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from normscope.cli import audit, checkpoint, claims, curvature, data, demo, diff, doctor, export, generalization, lab, report, serve
from normscope.core.errors import NormscopeError, Refusal
from normscope.core.text import inert, visible
from normscope.version import __version__

USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]  # click's, which newer versions of typer carry under another name


class Commands(TyperGroup):
    """Turns every error that a user can fix into one line on stderr and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except Refusal as refusal:
            code = _say(f"{refusal.headline}:", *(f"  {cause}" for cause in refusal.causes), refusal.advice, code=3)
        except NormscopeError as error:
            code = _say(str(error), code=2)
        except USAGE_ERROR as error:
            command = error.ctx.command_path if error.ctx else "normscope"
            code = _say(f"{error.format_message().rstrip('.')}; see {command} --help", code=2)
        except OSError as error:  # a full disk names no file
            code = _say(f"{error.filename or 'writing failed'}: {error.strerror or error}", code=2)
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        sys.exit(code if isinstance(code, int) else 0)


def _say(*lines: str, code: int) -> int:
    print(inert("normscope: " + "\n".join(visible(line) for line in lines if line)), file=sys.stderr)
    return code


def _version(wanted: bool) -> None:
    if wanted:
        print(f"normscope {__version__}")
        raise typer.Exit


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _normscope(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """See what normalization does to your network."""
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command()(audit.audit)
app.command()(checkpoint.checkpoint)
app.command()(claims.claims)
app.command()(curvature.curvature)
app.command()(demo.demo)
app.command()(diff.diff)
app.command()(doctor.doctor)
app.command()(diff.fold)
app.command()(export.export)
app.command()(report.report)
app.command()(serve.serve)
app.command()(generalization.generalization)
app.add_typer(data.data, name="data")
app.add_typer(lab.lab, name="lab")


def main() -> None:
    """The entry point of `normscope` and of `python -m normscope`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ‖ and ≤ shows ? rather than a traceback
    app(prog_name="normscope")
