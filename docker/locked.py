"""The part of requirements.lock.txt that some packages need, so that an image holds that and nothing else.

    python3 docker/locked.py airflow-tfps[compose] > airflow.txt
    python3 docker/locked.py tensorflow-cpu > host.txt
    pip install --require-hashes --no-deps -r airflow.txt

Versions and hashes are the lock's own. Which package needs which stands in the lock as `# via`. Reads pyproject.toml
and requirements.lock.txt beside the folder of this file; standard library only. Exits with a message when a package is
not in the lock.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "airflow-tfps"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def locked(wanted: list[str], lock: str, project: dict) -> str:
    """The blocks of `lock` for these packages and all that they need. Raises KeyError naming one it does not have.

    Args:
        wanted: Package names; the project itself, with or without extras, stands for what it depends on.
        lock: Text of the lock.
        project: The table `project` of pyproject.toml.
    """
    blocks: dict[str, str] = {}
    needs: dict[str, set[str]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock):
        if "==" not in block.partition("\n")[0]:
            continue
        name = NAME.match(block).group()
        # A package whose version depends on the platform has a block for each.
        blocks[name] = f"{blocks[name]}\n{block}" if name in blocks else block
        for parent in re.findall(r"^    #(?: via|  ) +([A-Za-z0-9][A-Za-z0-9._-]*)", block, re.MULTILINE):
            needs.setdefault(parent, set()).add(name)
    left = [name for word in wanted for name in _roots(word, project)]
    chosen: set[str] = set()
    while left:
        name = left.pop()
        if name not in chosen:
            if name not in blocks:
                raise KeyError(name)
            chosen.add(name)
            left += needs.get(name, ())
    return "\n".join(blocks[name].rstrip("\n") for name in sorted(chosen)) + "\n"


def _roots(word: str, project: dict) -> list[str]:
    """The packages that a word of the command line stands for."""
    name, _, extras = word.partition("[")
    if name != PROJECT:
        return [name]
    requirements = list(project["dependencies"])
    for extra in filter(None, extras.rstrip("]").split(",")):
        requirements += project["optional-dependencies"][extra]
    return [NAME.match(requirement).group().lower() for requirement in requirements]


def main() -> None:
    """Print the blocks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    try:
        sys.stdout.write(locked(sys.argv[1:], (ROOT / "requirements.lock.txt").read_text("utf-8"), project))
    except KeyError as error:
        sys.exit(
            f"{error.args[0]} is not in requirements.lock.txt: name a package that `make lock` has put there"
        )


if __name__ == "__main__":
    main()
