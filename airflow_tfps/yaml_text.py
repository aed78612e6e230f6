"""YAML as people mean it: a little stricter, and nearer to YAML 1.2, than PyYAML's SafeLoader.

Imports PyYAML only. A key that is written twice is refused, and `1e-3` is a number.

    parse_yaml("roles: {ps: 1}")        # {"roles": {"ps": 1}}
    plain_scalar("0.8")                 # 0.8
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `1e-3` as the number it is in YAML 1.2 and JSON, not as text."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+\Z|" + pattern.pattern, re.VERBOSE))
        if tag.endswith(":float")
        else (tag, pattern)
        for tag, pattern in resolvers
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null"))
_STR = "tag:yaml.org,2002:str"
_FAILURES = (
    yaml.YAMLError,
    ValueError,  # 2024-13-45 looks like a date
    OverflowError,  # 1:1:1:… is a number to the base of 60
    AttributeError,  # !!timestamp nonsense
    LookupError,  # !!int '', !!bool nonsense
    TypeError,
    RecursionError,
)
"""What PyYAML raises for text that is not what its tag or its look says."""


class YamlError(ValueError):
    """Text is not YAML; the message names line and column."""


def parse_yaml(text: str, *, as_text: Iterable[str] = ()) -> Any:
    """Parse one YAML document. Raises YamlError, also for a key that is written twice.

    The top-level keys `as_text` keep a plain value with a leading `+` as text (YAML reads `+5` as 5).
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _refuse_doubles(node, set())
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value in as_text and isinstance(value, yaml.ScalarNode) and value.value[:1] == "+":
                        value.tag = _STR
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(f"{where}{error.problem or error.context}") from None
    except _FAILURES as error:
        raise YamlError(f"not YAML: {error}") from None


def _refuse_doubles(node: yaml.Node, seen: set[int]) -> None:
    """Raise for a key that is written twice in one mapping: YAML would silently take the last."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag == _STR:
                if key.value in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value} is written twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
            _refuse_doubles(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_doubles(item, seen)


def plain_scalar(text: str) -> Any:
    """What `text` means where YAML has a plain scalar: a number, true or false, null, or text.

    Python's `None` is null: that is how Jinja prints it.

    A list or mapping in brackets is read too, since that is how Jinja prints one. No other YAML syntax
    counts: a rendered `# 3` or `key: value` is text.
    """
    stripped = text.strip()
    if stripped == "None":
        return None
    if stripped[:1] in ("[", "{"):
        try:
            return parse_yaml(stripped)
        except YamlError:
            return text
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, stripped, (True, False))  # type: ignore[no-untyped-call]
        if not stripped or tag not in _PLAIN_TAGS:
            return text
        return loader.construct_object(yaml.ScalarNode(tag, stripped))
    except _FAILURES:  # YAML's int pattern lets `0b` and the like through
        return text
    finally:
        loader.dispose()
