"""A user's own part: `module:name` wherever a built-in part has a short name.

    resolve("tasks.memory", "mem1", RULES)                     one of ours
    resolve("tasks.memory", "my_rules:LastTwo", RULES, ...)    a class in my_rules.py, here or on PYTHONPATH

The module is looked for in the working directory too, as `python -m` does. Mistakes are one line, which names the
setting, and cost no model: everything that a run names is resolved before the first is loaded.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any


def resolve(setting: str, name: str, builtin: Mapping[str, Any], methods: Sequence[str] = ()) -> Any:
    """The built-in part called `name`, or what `module:name` says. A class must have `methods`."""
    if name in builtin:
        return builtin[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        known = ", ".join(builtin)
        raise ValueError(f"{setting}: {name!r} is not one of {known}; your own is written module:name")
    part = _imported(setting, name, module, attribute)
    if not callable(part):
        raise ValueError(f"{setting}: {name!r} must be a {_kind(methods)}, got {type(part).__name__}")
    if missing := [method for method in methods if not hasattr(part, method)]:
        raise ValueError(f"{setting}: {name!r} must be a {_kind(methods)}; it has no {', '.join(missing)}")
    return part


def build(setting: str, name: str, part: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call `part` with what it asks for by name, of what is `offered`.

    >>> build("tasks.memory", "m:Rule", lambda codec, size=2: (codec, size), {"codec": "utf-8", "index": None})
    ('utf-8', 2)
    """
    named = check_parameters(setting, name, part, offered)
    return part(**{parameter: offered[parameter] for parameter in named})


def check_parameters(setting: str, name: str, part: Callable[..., Any], offered: Iterable[str]) -> list[str]:
    """Which of what is `offered` the part asks for; an error where it asks for more. Calls nothing."""
    offered = list(offered)
    wanted = inspect.signature(part).parameters.values()
    named = [p for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unknown := [p.name for p in named if p.default is p.empty and p.name not in offered]:
        raise ValueError(
            f"{setting}: {name!r} asks for {', '.join(unknown)}; it can have {', '.join(offered) or 'nothing'}: "
            "rename the parameter, or give it a default"
        )
    return [p.name for p in named if p.name in offered]


def _imported(setting: str, name: str, module: str, attribute: str) -> Any:
    here = os.getcwd()
    sys.path.append(here)
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise ValueError(f"{setting}: {name!r}: {error}; put its folder in PYTHONPATH, or run from it") from None
    except ImportError as error:
        raise ValueError(f"{setting}: {name!r}: {error}") from None
    except AttributeError:
        raise ValueError(f"{setting}: {name!r}: module {module!r} has no {attribute!r}") from None
    finally:
        sys.path.remove(here)


def _kind(methods: Sequence[str]) -> str:
    return f"class with {', '.join(methods)}" if methods else "function"
