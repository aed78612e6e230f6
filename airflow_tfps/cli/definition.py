"""What `airflow tfps` can do, as Airflow's parser wants to know it.

Read by each `airflow` command, also by those of others: imports Airflow's own definitions and nothing else. The work is
in `commands`, imported when one is called.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from airflow.cli.cli_config import (
    ARG_OUTPUT,
    ARG_VERBOSE,
    ActionCommand,
    Arg,
    GroupCommand,
    lazy_load_command,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow.cli.cli_config import CLICommand


def number(text: str) -> float:
    """A number that is not negative. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def count(text: str) -> int:
    """A whole number that is not negative. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def arg(*flags: str, **how: Any) -> Arg:
    """An argument as `argparse` takes it."""
    return Arg(flags, **how)  # type: ignore[no-untyped-call]


HOSTS = arg(
    "-H",
    "--hosts",
    nargs="+",
    default=["tfps_default"],
    metavar="HOSTS",
    help="what TrainingTaskGroup takes as `hosts`: a connection of type tfps or ssh, a file ending in .yaml, "
    "`local`, or several ssh connections (default: the connection tfps_default)",
)
TRAINING = arg(
    "-t",
    "--training",
    metavar="ID",
    help="a training, dag/run/group#incarnation as `status` shows it, or without # all incarnations of a key",
)
DAG_ID = arg("-d", "--dag-id", help="trainings of this DAG")
RUN_ID = arg("-r", "--run-id", help="trainings of this DAG run")
GROUP_ID = arg("-g", "--group-id", help="trainings of this task group")
MAP_INDEX = arg("-m", "--map-index", type=count, help="trainings of this index of a mapped group")
SELECTION = (TRAINING, DAG_ID, RUN_ID, GROUP_ID, MAP_INDEX)
JOB = arg("job", metavar="JOB", help="a job's YAML file")


def _command(name: str, help_: str, description: str, *args: Arg, shows: bool = True) -> ActionCommand:
    func: Callable[..., object] = lazy_load_command(f"airflow_tfps.cli.commands.{name}")
    more = (ARG_OUTPUT, ARG_VERBOSE) if shows else (ARG_VERBOSE,)
    return ActionCommand(name=name, help=help_, description=description, func=func, args=(*args, *more))


COMMANDS = (
    _command(
        "plan",
        "Show where a job's TF tasks would go",
        "Read a job and an inventory, and place the TF tasks. Asks no host anything.",
        JOB,
        HOSTS,
        arg("--mode", choices=("sync", "async"), help="instead of the job's"),
        arg("--steps", help="instead of the job's"),
    ),
    _command(
        "preflight",
        "Look at hosts: what they have and what they lack",
        "Connect to every host, and show its key, Python, TensorFlow, GPUs and disk. Nothing is reserved. Exit code 1 "
        "when a host cannot be used.",
        HOSTS,
        arg("--job", metavar="JOB", help="look for what this job needs: modules of `preload`, GPUs"),
    ),
    _command(
        "status",
        "Show trainings on hosts, with the state of each TF task",
        "The trainings that live on the hosts, all of them or those chosen. Renews no lease.",
        HOSTS,
        *SELECTION,
        arg("-e", "--ended", action="store_true", help="show those that have ended, too"),
    ),
    _command(
        "logs",
        "Show a TF task's log",
        "The end of a TF task's log, of a living training or of the newest that has ended. The log of Airflow's task "
        "misses nothing of what is shown here.",
        arg("task", metavar="TASK", help="for example worker:0, or ps:1@gpu-b"),
        HOSTS,
        *SELECTION,
        arg("-n", "--lines", type=count, default=100, help="how many lines from its end (default: 100)"),
        arg("-f", "--follow", action="store_true", help="go on with new lines until the training ends"),
        shows=False,
    ),
    _command(
        "stop",
        "End trainings on hosts",
        "End the chosen trainings: first on the chief's host, which saves, then on the others; what ignores SIGTERM is "
        "killed after the job's grace time. Airflow sees its task fail. Exit code 1 when something may be left.",
        HOSTS,
        *SELECTION,
        arg("-a", "--all", action="store_true", help="all trainings that live on the hosts"),
        arg("--grace-secs", type=number, help="instead of the job's"),
    ),
    _command(
        "sweep",
        "Remove what dead trainings left on hosts",
        "Remove locks, sockets and processes of dead agents, broken uploads, and old directories, programs and inputs "
        "that no living training uses. Never a checkpoint.",
        HOSTS,
        arg("-n", "--dry-run", action="store_true", help="only show what would be removed"),
        arg("--training-days", type=number, help="keep trainings that ended for so long (default: 14)"),
        arg("--unused-days", type=number, help="keep unused programs and inputs so long (default: 14)"),
        arg("--upload-hours", type=number, help="keep unfinished uploads for so long (default: 6)"),
    ),
    _command(
        "checkpoints",
        "List the complete checkpoints of a directory on a host",
        "List the checkpoints of a directory that have all their parts, by global step.",
        arg("directory", metavar="DIR", help="on the host"),
        HOSTS,
        arg("--host", help="which of them; needless if there is only one"),
    ),
    _command(
        "init",
        "Write a first DAG, job and program into a folder",
        "Write a DAG, its job and its program, ready to run, into a folder. Nothing that is there is overwritten.",
        arg("folder", metavar="FOLDER", help="the DAGs folder, or one inside it; made if need be"),
        HOSTS,
        shows=False,
    ),
    _command(
        "demo",
        "Run the main job on this machine, with hosts and an Airflow of its own",
        "What `make demo` does: three SSH hosts, Airflow, a nightly training, all below --home; nothing is left.",
        arg("--dags", metavar="DIR", help="a folder in place of the example DAGs"),
        arg("--home", metavar="DIR", help="emptied first (default: .demo here)"),
        arg("--out", metavar="FILE", help="the result (default: result.json here)"),
        arg("--steps", type=count, help="global steps"),
        arg("--mode", choices=("sync", "async")),
        arg("--exit", action="store_true", help="do not stay up after the summary"),
        shows=False,
    ),
)


def get_cli_commands() -> list[CLICommand]:
    """What Airflow calls, as the provider info says."""
    return [
        GroupCommand(
            name="tfps",
            help="TensorFlow parameter-server training on SSH hosts",
            description="Plan, watch and end trainings, and look after their hosts.",
            subcommands=COMMANDS,
        )
    ]
