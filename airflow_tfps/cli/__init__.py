"""`airflow tfps …`: the terminal's way to plans, hosts and trainings.

`definition` says which commands there are and imports nothing heavy: every `airflow` command reads it.
"""
