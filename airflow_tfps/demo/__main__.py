"""`python -m airflow_tfps.demo`."""

import sys

from airflow_tfps.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
