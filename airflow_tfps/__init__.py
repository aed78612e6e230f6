"""Airflow provider: TensorFlow parameter-server training on plain SSH hosts."""

__version__ = "0.1.0"
