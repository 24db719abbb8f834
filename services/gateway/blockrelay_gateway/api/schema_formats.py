"""The formats of a JSON schema that llguidance takes too lightly, as regular expressions.

Its `date` has a 29th of February in every year, and its times have leap seconds at any minute; both are refused by
programs that read the answer. Here a date is one of the calendar, and no minute has a 61st second.
"""

from collections.abc import Mapping
from typing import Any, cast

_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
PATTERNS: Mapping[str, str] = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
#: Keywords whose values are texts of JSON and no schemas.
_PLAIN = frozenset({"const", "enum", "default", "examples"})
#: Keywords whose values are schemas by names, which may be those of keywords.
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


def with_patterns(schema: object) -> Any:
    """Returns a JSON schema with a `pattern` instead of each `format` in PATTERNS; `schema` stays as it is.

    A schema that has a `pattern` too gets both, in an `allOf`. It must not be nested too deep for recursion.
    """
    if isinstance(schema, list):
        return [with_patterns(one) for one in cast(list[object], schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast(dict[str, object], schema)
    changed = {name: _value(name, value) for name, value in fields.items()}
    form = fields.get("format")
    pattern = PATTERNS.get(form) if isinstance(form, str) else None
    if pattern is None:
        return changed
    del changed["format"]
    if "pattern" not in changed:
        return {**changed, "pattern": pattern}
    return {**changed, "allOf": [*cast(list[object], changed.get("allOf", [])), {"pattern": pattern}]}


def _value(keyword: str, value: object) -> Any:
    """Returns the value of a schema's keyword, with patterns where it consists of schemas."""
    if keyword in _PLAIN:
        return value
    if keyword in _NAMED and isinstance(value, dict):
        return {name: with_patterns(one) for name, one in cast(dict[str, object], value).items()}
    return with_patterns(value)
