"""Dataclasses that travel as JSON between the two sides: round trip, types checked, unknown keys refused.

Standard library only. Data from the other side is treated as hostile: its size, depth, keys and types.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class ProtocolError(ValueError):
    """Data from the other side, or from a file, does not have the form that this module describes."""


def check(value: Any, kind: Any, where: str) -> Any:
    """`value` as `kind` (a subset of typing's forms). Raises ProtocolError naming the place."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Union:
        if value is None and type(None) in arguments:
            return None
        return check(value, next(a for a in arguments if a is not type(None)), where)
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ProtocolError(f"{where}: a list is needed")
        return origin(check(v, arguments[0], f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
            raise ProtocolError(f"{where}: an object is needed")
        return {k: check(v, arguments[1], f"{where}.{k}") for k, v in value.items()}
    if isinstance(kind, type):
        if issubclass(kind, Message):
            return kind.from_json(value, where)
        if issubclass(kind, Enum):
            try:
                return kind(value)
            except ValueError:
                raise ProtocolError(f"{where}: unknown value {str(value)[:40]!r}") from None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise ProtocolError(f"{where}: too large a number") from None
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            if (
                isinstance(value, int) and not -(2**63) <= value < 2**63
            ):  # its digits alone could fill an XCom
                raise ProtocolError(f"{where}: too large a number")
            return value
    raise ProtocolError(f"{where}: {getattr(kind, '__name__', kind)} is needed, not {type(value).__name__}")


class Message:
    """Base of the dataclasses that travel as JSON: round trip, types checked, unknown keys refused."""

    def to_json(self) -> dict[str, Any]:
        return {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "") -> Self:
        """Build from parsed JSON. Raises ProtocolError naming the first thing that is wrong."""
        where = where or cls.__name__
        if not isinstance(data, dict):
            raise ProtocolError(f"{where}: an object is needed, not {type(data).__name__}")
        hints = _hints(cls)
        unknown = sorted(set(data) - set(hints))
        if unknown:
            raise ProtocolError(f"{where}: unknown key {str(unknown[0])[:40]!r}")
        values = {}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            if f.name in data:
                values[f.name] = check(data[f.name], hints[f.name], f"{where}.{f.name}")
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ProtocolError(f"{where}: {f.name!r} is missing")
        return cls(**values)

    def dumps(self) -> str:
        return dump(self.to_json())

    @classmethod
    def loads(cls, text: str) -> Self:
        return cls.from_json(load(text))


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return value.to_json()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


MAX_LINE = 4 * 1024 * 1024
"""Bytes of one line on the wire; a longer one is an error of the sender."""

MAX_DEPTH = 64
"""Levels of lists and objects in one line; what is nested deeper could be read here and nowhere else."""


def dump(data: Any) -> str:
    """One line of JSON, without the newline."""
    return json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def load(text: str) -> Any:
    """Parse one line of JSON that the other side wrote.

    Raises ProtocolError: for NaN and infinite numbers, and for more than MAX_LINE or MAX_DEPTH, too.
    """
    if len(text) > MAX_LINE:
        raise ProtocolError(f"a line of {len(text)} characters")
    try:
        data = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {text[:80]!r} ({error})") from None
    level, depth = [data], 0
    while level:
        if depth > MAX_DEPTH:
            raise ProtocolError(f"lists and objects nested more than {MAX_DEPTH} deep: {text[:80]!r}")
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
    return data


def _finite(text: str) -> float:
    """A number as `dump` writes it; the parser of the standard library takes NaN, Infinity and 1e999 as well."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a number of JSON")
    return value
