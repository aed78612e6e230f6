"""How commands speak: tables through Airflow's console, one line for an error, exit codes.

What hosts say is shown without whatever could steer a terminal.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from airflow_tfps.errors import TfpsError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

INTERRUPTED = 130
"""What a shell says of a command that SIGINT ended."""


def command(do: Callable[[Namespace], int | None]) -> Callable[[Namespace], NoReturn]:
    """A command of Airflow's parser: what `do` returns is the exit code; our own errors are one line, and 1."""

    @functools.wraps(do)
    def run(args: Namespace) -> NoReturn:
        # As `airflow connections` does: only then does Airflow look into its database for connections.
        os.environ["_AIRFLOW_PROCESS_CONTEXT"] = "server"
        disabled = logging.root.manager.disable
        try:
            with warnings.catch_warnings():
                if not args.verbose:
                    warnings.simplefilter("ignore")
                    logging.disable(logging.WARNING)
                code = do(args) or 0
            sys.stdout.flush()
        except TfpsError as error:
            complain(str(error))
            code = 1
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:  # `airflow tfps logs … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        finally:
            logging.disable(disabled)
        sys.exit(code)

    return run


def audited(run: Callable[[Namespace], NoReturn]) -> Callable[[Namespace], NoReturn]:
    """Let Airflow note in its audit log who called the command and when, as it does of its own; best effort."""
    from airflow.utils.cli import action_cli

    noted: Callable[[Namespace], NoReturn] = action_cli(run, check_db=False)  # type: ignore[no-untyped-call]
    return noted


def plain(text: object) -> str:
    """Text that a terminal shows and does not obey."""
    shown = str(text).encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in shown)


def complain(text: str) -> None:
    """An error or a warning, to standard error."""
    sys.stderr.write("\n".join(map(plain, text.splitlines())) + "\n")


def say(text: str) -> None:
    """A line for people or pipes; in an encoding that lacks a character, its escape."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(plain(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")


def show(rows: Sequence[Mapping[str, Any]], output: str, *, nothing: str = "") -> None:
    """Rows as `--output` asks for: a table for people, or `plain`, `json`, `yaml`, where numbers stay numbers."""
    from airflow.cli.simple_table import AirflowConsole
    from airflow.utils import yaml

    if output == "json":
        say(json.dumps(rows))
    elif output == "yaml":
        for line in yaml.safe_dump([dict(row) for row in rows], sort_keys=False).splitlines():
            say(line)
    elif rows:
        texts = [{k: "" if v is None else plain(v) for k, v in row.items()} for row in rows]
        if output == "table":
            from rich.markup import escape

            texts = [{k: escape(v) for k, v in row.items()} for row in texts]
        AirflowConsole().print_as(texts, output)
    elif nothing:
        complain(nothing)


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
