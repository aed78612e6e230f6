"""Everything secret of the compose stack, made at the first start, and brought to whom it concerns and nobody else.

    python make_secrets.py /volumes

Below that folder are the volumes: `secrets` holds what was generated, one JSON file that no other service mounts.
From it the others are written anew at each start: `airflow` (configuration, passwords, connections), `postgres`,
`redis`, and one with the SSH keys of each host. Idempotent; a start that was cut short is made good by the next. Runs
as root, since every file belongs to the user that reads it.

A file of JSON that TFPS_HOSTS names takes the place of the stack's hosts: name of a host to its `host`, `host_key`,
`login`, `port`, `gpus`, `python` and `workdir`, of which the first two are needed.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

AIRFLOW, POSTGRES, REDIS, TRAIN = 50000, 999, 998, 1000
"""User ids in the images."""
HOSTS = ("gpu-a", "gpu-b", "gpu-c")
PASSWORDS = ("api_secret", "jwt_secret", "postgres", "redis")
INVENTORY = "gpu_lab"
"""The connection that the example DAGs name."""
OF_INVENTORY = ("gpus", "python", "workdir")


def main(folder: Path) -> None:
    """Generate what is missing, then write every file of every volume."""
    made = generate(folder / "secrets" / "secrets.json")
    airflow = {
        "airflow.cfg": config(made),
        "passwords.json": json.dumps(made["users"]) + "\n",
        "connections.json": json.dumps(connections(made, own_hosts()), indent=2) + "\n",
        "train_key.pub": public(made["train_key"]) + "\n",
    }
    redis = f"requirepass {made['redis']}\nprotected-mode no\nappendonly yes\ndir /data\n"
    deliver(folder / "airflow", AIRFLOW, airflow)
    deliver(folder / "postgres", POSTGRES, {"password": made["postgres"]})
    deliver(folder / "redis", REDIS, {"redis.conf": redis})
    for name in HOSTS:
        keys = {
            "ssh_host_ed25519_key": made["host_keys"][name],
            "authorized_keys": public(made["train_key"]) + "\n",
        }
        deliver(folder / name, TRAIN, keys)


def generate(path: Path) -> dict[str, Any]:
    """What was generated, made complete; a later version of the stack may want more than an earlier one."""
    made = json.loads(path.read_text()) if path.exists() else {}
    before = json.dumps(made)
    for name in PASSWORDS:
        made.setdefault(name, secrets.token_hex(24))
    made.setdefault("fernet", Fernet.generate_key().decode())
    made.setdefault("train_key", private())
    for name in HOSTS:
        made.setdefault("host_keys", {}).setdefault(name, private())
    for user in os.environ.get("TFPS_USERS", "admin:admin").split(","):
        made.setdefault("users", {}).setdefault(user.partition(":")[0], secrets.token_urlsafe(15))
    if json.dumps(made) != before:
        write(path, json.dumps(made), 0)
    return made


def private() -> str:
    """A fresh private key as OpenSSH keeps it."""
    return (
        Ed25519PrivateKey.generate()
        .private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        .decode()
    )


def public(key: str) -> str:
    """The public half, `ssh-ed25519 AAAA...`."""
    found = serialization.load_ssh_private_key(key.encode(), None).public_key()
    return found.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def config(made: dict[str, Any]) -> str:
    """The secret part of Airflow's configuration; the rest is in docker-compose.yml."""
    database = f"postgresql+psycopg2://airflow:{made['postgres']}@postgres/airflow"
    sections = {
        "core": {"fernet_key": made["fernet"]},
        "api": {"secret_key": made["api_secret"]},
        "api_auth": {"jwt_secret": made["jwt_secret"]},
        "database": {"sql_alchemy_conn": database},
        "celery": {
            "broker_url": f"redis://:{made['redis']}@redis:6379/0",
            "result_backend": f"db+{database}",
        },
    }
    lines = [
        f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in options.items())
        for section, options in sections.items()
    ]
    return "\n".join(lines)


def own_hosts() -> dict[str, dict[str, Any]] | None:
    """What the file TFPS_HOSTS names; None without one. Exits with a message when it cannot be used."""
    path = os.environ.get("TFPS_HOSTS")
    if not path:
        return None
    try:
        hosts = {name: dict(host) for name, host in json.loads(Path(path).read_text()).items()}
    except (OSError, AttributeError, TypeError, ValueError) as error:
        sys.exit(f"TFPS_HOSTS: {error}; it must be a file of JSON: name of a host to its host and host_key")
    known = {"host", "host_key", "login", "port", *OF_INVENTORY}
    for name, host in hosts.items():
        if unknown := set(host) - known:
            sys.exit(
                f"TFPS_HOSTS: {name}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
            )
        if missing := {"host", "host_key"} - set(host):
            sys.exit(
                f"TFPS_HOSTS: {name}: {', '.join(sorted(missing))} is missing; `ssh-keyscan` shows a host's key"
            )
    return hosts


def connections(made: dict[str, Any], own: dict[str, dict[str, Any]] | None) -> dict[str, Any]:
    """For `airflow connections import`: one of each host and the inventory."""
    hosts = own or {
        name: {
            "host": name,
            "port": 2222,
            "host_key": public(made["host_keys"][name]),
            "python": "/opt/tf/bin/python",
        }
        for name in HOSTS
    }
    found: dict[str, Any] = {
        name: {
            "conn_type": "ssh",
            "host": host["host"],
            "port": host.get("port", 22),
            "login": host.get("login", "train"),
            "extra": {"private_key": made["train_key"], "host_key": host["host_key"]},
        }
        for name, host in hosts.items()
    }
    inventory = {
        name: {"ssh_conn_id": name} | {key: host[key] for key in OF_INVENTORY if key in host}
        for name, host in hosts.items()
    }
    return {**found, INVENTORY: {"conn_type": "tfps", "extra": {"hosts": inventory}}}


def deliver(folder: Path, owner: int, files: dict[str, str]) -> None:
    """Write files that only their owner can read."""
    folder.chmod(0o700)
    os.chown(folder, owner, owner)
    for name, content in files.items():
        write(folder / name, content, owner)


def write(path: Path, content: str, owner: int) -> None:
    """The file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(content)
        os.fchown(file.fileno(), owner, owner)
    partial.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
