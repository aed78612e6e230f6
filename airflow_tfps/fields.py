"""Reads YAML into frozen dataclasses: every fault at once, each with its path in the file.

The dataclasses' annotations are the schema: plain types, `Literal`, `X | None`, `tuple[X, ...]`,
`Mapping[str, X]`, other dataclasses, `Any` (whatever JSON holds), and `Annotated` with the checks and
conversions below.

    reader = Reader()
    timeouts = reader.read(Timeouts, {"ready_secs": 0}, "timeouts")
    reader.faults       # ["timeouts.ready_secs: must be > 0, is 0"]

A value that could not be read is `UNKNOWN` in what `read` returns, so that checks over several fields can go
on with the rest. Text with a Jinja template in it is `Template` when templates are allowed; a value that
Airflow has rendered comes as `Rendered` and is converted to what its field needs.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from airflow_tfps.templates import Rendered, Template, is_template
from airflow_tfps.yaml_text import plain_scalar

T = TypeVar("T")

MAX_DEPTH = 16
MAX_VALUES = 10_000
"""Of free-form values: what fits an XCom. YAML's aliases can blow up, or hold themselves."""

_IS_YAML = "is_yaml"
NOT_IN_YAML: Mapping[str, bool] = {_IS_YAML: False}
"""Metadata of a dataclass field that is no key of the file."""


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = _Unknown()
"""In place of a value that has a fault."""


def is_known(value: object) -> bool:
    """Whether `value` can be compared with others: neither faulty nor still to be rendered."""
    return value is not UNKNOWN and not isinstance(value, Template)


def nearest(name: object, known: Iterable[str]) -> str:
    """`; did you mean x?`, or nothing if none of `known` is near."""
    close = difflib.get_close_matches(_short(name, 80), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


# --- constraints, written into annotations ------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """A number from `least` to `most`, both included."""

    least: int
    most: int | None = None

    def __call__(self, value: Any) -> str | None:
        if value < self.least:
            return f"must be >= {self.least}, is {show(value)}"
        if self.most is not None and value > self.most:
            return f"must be <= {self.most}, is {show(value)}"
        return None


@dataclass(frozen=True)
class Above:
    """A number greater than `limit`."""

    limit: int

    def __call__(self, value: Any) -> str | None:
        return None if value > self.limit else f"must be > {self.limit}, is {show(value)}"


@dataclass(frozen=True)
class Matches:
    """Text of which a regular expression matches the whole; `words` say in English what is needed."""

    pattern: str
    words: str

    def __call__(self, value: Any) -> str | None:
        return (
            None
            if re.fullmatch(self.pattern, value, re.DOTALL)
            else f"must be {self.words}, is {show(value)}"
        )


@dataclass(frozen=True)
class NotEmpty:
    """At least one character or item."""

    def __call__(self, value: Any) -> str | None:
        return None if value else "must not be empty"


@dataclass(frozen=True)
class Convert:
    """Another way to write a value: `function` turns it into the field's type, or raises ValueError.

    The error's message becomes the fault. What it does not know it returns as it is. Templates pass by unless
    it `sees_templates`.
    """

    function: Callable[[Any], Any]
    sees_templates: bool = False


def text_of_number(value: object) -> object:
    """Numbers as text, for argv and environments. A boolean is no number: it has too many spellings."""
    if isinstance(value, bool):
        message = f"must be text; put {show(value)} into quotes, spelled the way the program reads it"
        raise ValueError(message)  # noqa: TRY004  (a Convert's way to tell a fault)
    return str(value) if isinstance(value, (int, float)) else value


NAME = Matches(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
    "letters, digits, '.', '_' and '-', at most 63, the first a letter or digit",
)
"""Names of jobs and hosts: they become part of file names and log lines."""

TextOrNumber = Annotated[str, Convert(text_of_number)]
Seconds = Annotated[float, Above(0)]


# --- reading ------------------------------------------------------------------------------------------------


class Reader:
    """Collects the faults of one document. `given` holds the path of every key that is written in it."""

    def __init__(self, *, templated: bool = False) -> None:
        self.templated = templated
        self.faults: list[str] = []
        self.given: set[str] = set()
        self._values_left = MAX_VALUES

    def fault(self, path: str, message: str) -> Any:
        """Note a fault; returns UNKNOWN."""
        self.faults.append(f"{path}: {message}" if path else message)
        return UNKNOWN

    def read(self, kind: type[T], data: object, path: str = "") -> T:
        """`data` as dataclass `kind`, with UNKNOWN where it has faults; UNKNOWN itself if not a mapping."""
        if isinstance(data, Rendered) and isinstance(data.value, Mapping):
            data = data.value
        short = getattr(kind, "SHORT", None)
        if not isinstance(data, Mapping):
            if short is None or data is None or isinstance(data, (list, tuple)):
                return self.fault(path, f"must be a mapping, is {show(data)}")  # type: ignore[no-any-return]
            data = {short: data}
        hints = hints_of(kind)
        fields = {field.name: field for field in yaml_fields(kind)}
        for key in data:
            if key not in fields:
                known = nearest(key, fields) or f"; known are {', '.join(fields)}"
                self.fault(join(path, key), f"unknown key{known}")
        values = {}
        for name, field in fields.items():
            where = join(path, name)
            if data.get(name) is not None:
                self.given.add(where)
                values[name] = self.value(hints[name], data[name], where)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                values[name] = self.fault(where, "is missing")
        return kind(**values)

    def value(self, kind: Any, data: object, path: str) -> Any:
        """`data` as `kind` (an annotation), or UNKNOWN."""
        if kind is Any:
            return self._json(data, path, 0)
        options, is_optional = _options(kind)
        if is_optional and (data is None or (isinstance(data, Rendered) and data.is_blank)):
            return None
        if len(options) > 1:
            raise TypeError(f"{path}: a union of types needs a Convert")
        kind = options[0]
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            return self._annotated(arguments[0], arguments[1:], data, path)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self.read(kind, data, path)
        if isinstance(data, Rendered):
            data = _as_kind(data.value, kind)
        if origin is tuple:
            if not isinstance(data, (list, tuple)):
                return self.fault(path, f"must be a list, is {show(data)}")
            return _sound(tuple(self.value(arguments[0], v, f"{path}[{i}]") for i, v in enumerate(data)))
        if origin is Mapping:
            return self._mapping(arguments, data, path)
        if self.templated and is_template(data):
            return Template(data)
        return self._scalar(kind, data, path)

    def _annotated(self, kind: Any, extras: tuple[Any, ...], data: object, path: str) -> Any:
        is_open = self.templated and is_template(data)
        for extra in extras:
            if isinstance(extra, Convert) and (extra.sees_templates or not is_open):
                try:
                    data = extra.function(data)
                except ValueError as error:
                    return self.fault(path, str(error))
        if len(_options(kind)[0]) > 1:  # its Convert has checked it
            return Template(data) if is_open else data
        value = self.value(kind, data, path)
        if value is None or not is_known(value):
            return value
        for extra in extras:
            if callable(extra) and (message := extra(value)):
                return self.fault(path, message)
        return value

    def _mapping(self, arguments: tuple[Any, ...], data: object, path: str) -> Any:
        if not isinstance(data, Mapping):
            return self.fault(path, f"must be a mapping, is {show(data)}")
        names = [self._key(arguments[0], key, join(path, key)) for key in data]
        values = [self.value(arguments[1], item, join(path, key)) for key, item in data.items()]
        # What a faulty key was meant to be nobody knows: no rule may miss it in the mapping.
        return UNKNOWN if UNKNOWN in names else dict(zip(names, values, strict=True))

    def _key(self, kind: Any, key: object, path: str) -> Any:
        if not isinstance(key, str):
            return self.fault(path, f"the key must be text, is {show(key)}; put it into quotes")
        checks = typing.get_args(kind)[1:] if typing.get_origin(kind) is Annotated else ()
        for check in checks:
            if message := check(key):
                return self.fault(path, f"the key {message}")
        return key

    def _scalar(self, kind: Any, data: object, path: str) -> Any:
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            if isinstance(data, str) and data in choices:
                return data
            hint = nearest(data, choices) if isinstance(data, str) else ""
            return self.fault(path, f"must be {' or '.join(choices)}, is {show(data)}{hint}")
        if kind is float and isinstance(data, int) and not isinstance(data, bool):
            data = float(data) if abs(data) < 2**63 else data
        if isinstance(data, kind) and not (isinstance(data, bool) and kind is not bool):
            if kind is float and not math.isfinite(data):
                return self.fault(path, f"must be a finite number, is {show(data)}")
            if kind is str and (message := _text_fault(data)):
                return self.fault(path, message)
            return str(data) if kind is str else data
        return self.fault(path, f"must be {describe(kind)}, is {show(data)}")

    def _json(self, data: object, path: str, depth: int) -> Any:
        """Free-form values must survive JSON, which is how they reach the program."""
        if isinstance(data, Rendered):
            data = plain_scalar(data.value) if isinstance(data.value, str) else data.value
        if depth > MAX_DEPTH:
            return self.fault(path, f"is nested more than {MAX_DEPTH} deep")
        self._values_left -= 1
        if self._values_left < 0:
            return (
                self.fault(path, f"holds more than {MAX_VALUES} values")
                if self._values_left == -1
                else UNKNOWN
            )
        if data is None or isinstance(data, bool):
            return data
        if isinstance(data, int):
            return data if abs(data) < 2**63 else self.fault(path, "is a number of more than 64 bits")
        if isinstance(data, str):
            if message := _text_fault(data):
                return self.fault(path, message)
            return Template(data) if self.templated and is_template(data) else str(data)
        if isinstance(data, float):
            return data if math.isfinite(data) else self.fault(path, "must be a finite number")
        if isinstance(data, (list, tuple)):
            return _sound([self._json(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(data)])
        if isinstance(data, Mapping):
            names = {key: self._key(str, key, join(path, key)) for key in data}
            items = {key: self._json(value, join(path, key), depth + 1) for key, value in data.items()}
            return _sound({key: items[key] for key in data if names[key] is not UNKNOWN})
        kind = type(data).__name__
        return self.fault(
            path, f"must be what JSON can hold, is a {kind}; put it into quotes to make it text"
        )


def _sound(items: Any) -> Any:
    """UNKNOWN if anything in `items` is."""
    values = items.values() if isinstance(items, dict) else items
    return UNKNOWN if any(value is UNKNOWN for value in values) else items


def _options(kind: Any) -> tuple[list[Any], bool]:
    """The kinds that a union allows, and whether None is one of them."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        arguments = typing.get_args(kind)
        return [argument for argument in arguments if argument is not type(None)], type(None) in arguments
    return [kind], False


def _text_fault(text: str) -> str | None:
    if "\0" in text:
        return "must not hold a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "must be valid Unicode"
    return None


def _as_kind(value: object, kind: Any) -> object:
    """A rendered `value` as near to `kind` as it goes; what does not fit stays, and becomes a fault."""
    if kind is str:
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    if kind in (bool, int, float) and isinstance(value, str):
        value = plain_scalar(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value.strip() if typing.get_origin(kind) is Literal and isinstance(value, str) else value


# --- the dataclasses as a schema ----------------------------------------------------------------------------


def yaml_fields(kind: type) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that are keys of the file, in order."""
    return [field for field in dataclasses.fields(kind) if field.metadata.get(_IS_YAML, True)]


def hints_of(kind: type) -> dict[str, Any]:
    """The annotations of a dataclass, evaluated."""
    return typing.get_type_hints(kind, include_extras=True)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default; `dataclasses.MISSING` if it must be written."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def to_plain(value: object) -> Any:
    """What `Reader` would read as `value` again: defaults left out, short forms used."""
    if isinstance(value, Template):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        data = {
            field.name: to_plain(getattr(value, field.name))
            for field in yaml_fields(kind)
            if getattr(value, field.name) != default_of(field)
        }
        short = getattr(kind, "SHORT", None)
        if short is not None and set(data) <= {short}:
            return getattr(value, short)
        return data
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def describe(kind: Any) -> str:
    """An annotation in words, for messages and for the tables in the documentation."""
    if typing.get_origin(kind) is Annotated:
        return describe(typing.get_args(kind)[0])
    options, _ = _options(kind)
    if len(options) > 1:
        return " or ".join(describe(option) for option in options)
    origin, arguments = typing.get_origin(options[0]), typing.get_args(options[0])
    if origin is Literal:
        return " or ".join(arguments)
    if origin is tuple:
        return f"a list of {_plural(describe(arguments[0]))}"
    if dataclasses.is_dataclass(options[0]) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "a mapping"
    words = {
        str: "text",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        Any: "anything JSON can hold",
    }
    return words[options[0]]


def _plural(words: str) -> str:
    noun = words.partition(" ")[2] or words
    return noun if noun == "text" else f"{noun}s"


def join(path: str, key: object) -> str:
    name = _short(key, 60)
    name = name if re.fullmatch(r"[\w./:@-]+", name) else repr(name)
    return f"{path}.{name}" if path else name


def _short(key: object, length: int) -> str:
    """A key as text; in Python a key may be anything, even what cannot be printed."""
    return key[:length] if isinstance(key, str) else str(key) if key is None else show(key)


def show(value: object) -> str:
    """A value in a message: short, and unmistakable."""
    if value is None:
        return "empty"
    if isinstance(value, Rendered):
        return show(value.value)
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) < 2**63 else "a huge number"
    if isinstance(value, str):
        return repr(value[:60] + "…" if len(value) > 60 else str(value))
    if isinstance(value, (float, bytes, dt.date)):
        return repr(value)[:60]
    return f"a {type(value).__name__}"
