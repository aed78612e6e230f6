"""What runs on the hosts: the agent, its commands, and the training harness. Standard library only (Python 3.9)."""
