"""Text that Airflow renders: how it passes through a job, and what becomes of it.

While a DAG file is parsed a template stands in place of a value, as `Template`. Airflow makes text of it; so
that only such text is converted to numbers, and never what was written as text, it comes back as `Rendered`.

    template = job.to_dict()
    data = mark_rendered(template, rendered_by_airflow)     # {"steps": Rendered("10000"), "name": "digits"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class Template(str):
    """Text that Airflow has yet to render; stands where any scalar may stand."""

    __slots__ = ()


@dataclass(frozen=True)
class Rendered:
    """What Airflow made of a template: text, or any value if it renders to native objects."""

    value: Any

    @property
    def is_blank(self) -> bool:
        """Whether it came to nothing: Jinja prints None as `None`."""
        return self.value is None or (isinstance(self.value, str) and self.value.strip() in ("", "None"))


def is_template(value: object) -> bool:
    return isinstance(value, str) and ("{{" in value or "{%" in value)


def mark_rendered(template: object, rendered: object) -> Any:
    """`rendered` with each leaf that comes from a template of `template` wrapped as `Rendered`.

    Text without a template is taken from `template`: Jinja drops a final newline and comments even there.
    """
    if is_template(template):
        return Rendered(rendered)
    if isinstance(template, Mapping) and isinstance(rendered, Mapping):
        return {key: mark_rendered(template.get(key), value) for key, value in rendered.items()}
    if (
        isinstance(template, (list, tuple))
        and isinstance(rendered, (list, tuple))
        and len(template) == len(rendered)
    ):
        return [mark_rendered(one, other) for one, other in zip(template, rendered, strict=True)]
    return template if isinstance(template, str) else rendered


def map_templates(data: object, render: Callable[[str], object]) -> Any:
    """`data` with each template replaced by its `Rendered` value; `render` sees templates only."""
    if isinstance(data, str):
        return Rendered(render(str(data))) if is_template(data) else data
    if isinstance(data, Mapping):
        return {key: map_templates(value, render) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [map_templates(value, render) for value in data]
    return data
