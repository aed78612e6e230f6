"""The first process of a host of the bed: makes its files its own, keeps sshd running, reaps orphans.

`init.py NAME FOLDER SSHD`, in new namespaces. Standard library only.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def main() -> None:
    name, folder, sshd = sys.argv[1:]
    socket.sethostname(name)
    for source, target in ((f"{folder}/etc", "/etc"), (f"{folder}/var-tmp", "/var/tmp")):
        subprocess.run(["mount", "--bind", source, target], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)
    os.mkdir("/run/sshd", 0o755)
    os.environ.pop("TFPS_BED", None)
    with open(f"{folder}/sshd.log", "ab") as log:
        while True:
            server = subprocess.Popen(
                [sshd, "-D", "-e", "-f", f"{folder}/sshd_config"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            while True:
                pid, _ = os.wait()
                if pid == server.pid:
                    server.returncode = 0
                    break
            time.sleep(0.5)  # as a service manager waits before it starts a server anew


if __name__ == "__main__":
    main()
