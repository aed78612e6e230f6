"""`python tfps.pyz COMMAND`: on a host, JSON in on standard input and JSON lines out."""

from __future__ import annotations

import sys

USAGE = """usage: python -m tfps_runtime COMMAND
  run PROGRAM --local [--steps N] …   run a program in this one process
  evaluate | predict PROGRAM CHECKPOINT …, export PROGRAM CHECKPOINT DIRECTORY …
  preflight reserve start launch probe status trainings follow logs dump stop release put checkpoints pin sweep
  promote rollback models note
                                      what airflow-tfps calls on a host: a request as JSON on standard input
"""


def main() -> int:
    """Dispatch; imports only what the command needs."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "agent":
        from tfps_runtime import agent

        return agent.main()
    if name == "nursery":
        from tfps_runtime import nursery

        return nursery.main()
    if name == "task":
        from tfps_runtime import launch

        return launch.main()
    if name in ("run", "evaluate", "predict", "export"):
        from tfps_runtime import local

        return local.main(name, sys.argv[2:])
    from tfps_runtime import commands, models

    if name == "put" or name in commands.COMMANDS or name in models.COMMANDS:
        return commands.main(name)
    sys.stderr.write(USAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main())
