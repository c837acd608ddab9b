"""Parts of your own: you can write `module:name` wherever a built-in part has a short name.

    resolve("tasks.memory", "mem1", RULES)                     a built-in rule
    resolve("tasks.memory", "my_rules:LastTwo", RULES, ...)    a class in my_rules.py, here or on PYTHONPATH

Modules are also searched for in the working directory, as `python -m` does. A mistake is reported in one line that
names the setting, before any model is loaded: a run resolves all its names first.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any


def resolve(setting: str, name: str, builtin: Mapping[str, Any], methods: Sequence[str] = ()) -> Any:
    """Return the built-in part called `name`, or import `module:name`. A class must have `methods`."""
    if name in builtin:
        return builtin[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        known = ", ".join(builtin)
        raise ValueError(f"{setting}: {name!r} is not one of {known}; write module:name for your own")
    part = _imported(setting, name, module, attribute)
    if not callable(part):
        raise ValueError(f"{setting}: {name!r} must be a {_kind(methods)}, got {type(part).__name__}")
    if missing := [method for method in methods if not hasattr(part, method)]:
        raise ValueError(f"{setting}: {name!r} must be a {_kind(methods)}; it has no {', '.join(missing)}")
    return part


def build(setting: str, name: str, part: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call `part` with those of the `offered` arguments that its parameters name.

    >>> build("tasks.memory", "m:Rule", lambda codec, size=2: (codec, size), {"codec": "utf-8", "index": None})
    ('utf-8', 2)
    """
    check_parameters(setting, name, part, offered)
    return part(**{p: offered[p] for p in parameters(part) if p in offered})


def check_parameters(setting: str, name: str, part: Callable[..., Any], offered: Collection[str]) -> None:
    """Raise an error if `build` could not call `part` with the offered arguments, which need not exist yet."""
    needed = [p for p, has_default in parameters(part).items() if not has_default]
    if unknown := [p for p in needed if p not in offered]:
        raise ValueError(
            f"{setting}: {name!r} needs {', '.join(unknown)}; available: {', '.join(offered) or 'nothing'}; "
            "rename the parameter, or give it a default"
        )


def parameters(part: Callable[..., Any]) -> dict[str, bool]:
    """The named parameters of `part`, and whether each has a default.

    >>> parameters(lambda codec, size=2: None)
    {'codec': False, 'size': True}
    """
    wanted = inspect.signature(part).parameters.values()
    named = [p for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: p.default is not p.empty for p in named}


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether `function` can be called with `count` positional arguments.

    >>> takes(len, 1), takes(lambda task, responses: 0.0, 1)
    (True, False)
    """
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a function of C that does not say what it takes
        return True
    return True


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
