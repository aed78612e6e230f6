"""`make demo`: SSH hosts and an Airflow of its own on one machine; the tests use them too.

`run` is the demo itself. `hosts` serves SSH hosts, `stack` runs Airflow, `api` talks to it; `home` is the
demo's folder and what must not be left of it, `processes` finds that out, `view` is what people see.
"""
