"""The pages' app: static files only, the same for everybody. Imported in the API server alone."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

app = Starlette(routes=[Mount("/", StaticFiles(directory=Path(__file__).with_name("static")))])
