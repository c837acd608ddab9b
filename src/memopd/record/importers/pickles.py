"""Read a pickle without executing it.

A pickle is a program: it names functions of any module and calls them. This reader interprets the opcodes that build
values (numbers, text, bytes, lists, dictionaries), and imports and calls nothing. A named function or class is a
`Name`; its call is a record (`Made`) of the name and the arguments. `array` then knows the few records that stand for
arrays of NumPy and torch, and computes the numbers from their bytes.

    read_pickle(b"cposix\\nsystem\\n(S'ls'\\ntR.", ...)    refused: it names posix.system, and nothing was run

Only names of the packages that a caller lists may occur, so that a file that is not what it claims to be is refused.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Containers and helpers that pickles of harmless values name. The reader calls none of them.
_HARMLESS = {
    "_codecs.encode",
    "collections.OrderedDict",
    "collections.defaultdict",
    "copyreg._reconstructor",
    *(f"{m}.{n}" for m in ("builtins", "__builtin__") for n in ("set", "frozenset", "list", "dict", "bytes", "object")),
}


# The errors that damaged or forged bytes lead to, in this reader and in those who use what it read.
DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError, struct.error)


@dataclass(frozen=True, slots=True)
class Name:
    """A function or a class that a pickle names; it is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False, repr=False)
class Made:
    """What a pickle would have made by a call: the function or class, its arguments, and what was added later."""

    of: Name
    arguments: tuple[Any, ...]
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of a torch storage, and the name of their type, such as LongStorage."""

    data: bytes
    kind: str


def read_file(data: bytes, packages: Collection[str]) -> Any:
    """The value in the bytes of a pickle, or of a file that torch.save wrote."""
    return _read_torch(data, packages) if data[:4] == b"PK\x03\x04" else read_pickle(data, packages)


def first_name(data: bytes) -> str:
    """The first function or class that a pickle names, which tells who wrote it; empty if there is none.

    >>> import pickle
    >>> first_name(pickle.dumps(np.int64(3))).endswith("multiarray.scalar")
    True
    """
    texts: list[str] = []
    try:
        for opcode, value, _ in pickletools.genops(data):
            if opcode.name == "GLOBAL":
                return str(value).replace(" ", ".")
            if opcode.name == "STACK_GLOBAL":
                return ".".join(texts[-2:])
            if isinstance(value, str):
                texts.append(value)
    except Exception:  # not a pickle, or cut off: the reader will say so
        pass
    return ""


def read_pickle(data: bytes, packages: Collection[str], storage: Callable[[str], bytes] = lambda key: b"") -> Any:
    """The value of a pickle, with `Name` and `Made` where it would have imported and called something.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"a": [1, (2.5, None)]}), packages=())
    {'a': [1, (2.5, None)]}
    """
    machine = _Machine(packages, storage)
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument, position)
    except Refused:
        raise
    except DAMAGE as error:
        raise ValueError(f"not a pickle that can be read: {error}; is the file cut off or damaged?") from None
    raise ValueError("not a pickle that can be read: it has no end; is the file cut off?")


class Refused(ValueError):
    """A pickle that asks for something that the reader does not do."""


class _Machine:
    """Pickle's stack machine, without import and call."""

    def __init__(self, packages: Collection[str], storage: Callable[[str], bytes]) -> None:
        self.packages, self.storage = packages, storage
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, opcode: str, argument: Any, position: int | None) -> None:
        if opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode]())
        elif opcode in _VALUES:
            self.stack.append(argument)
        elif opcode in ("GLOBAL", "STACK_GLOBAL"):
            self.stack.append(self.name(opcode, argument))
        elif method := getattr(self, f"do_{opcode.lower()}", None):
            if argument is None:
                method()
            else:
                method(argument)
        elif opcode not in ("PROTO", "FRAME"):
            raise Refused(f"refused: it uses the opcode {opcode} at byte {position}, which such a batch does not need")

    def result(self) -> Any:
        (value,) = self.stack
        if self.marks:
            raise ValueError("a list has no end")
        return value

    def pop(self) -> Any:
        if self.marks and self.marks[-1] == len(self.stack):
            raise ValueError("a value is missing")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def name(self, opcode: str, argument: Any) -> Name:
        if opcode == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
        else:
            attribute, module = self.pop(), self.pop()
        if not (type(module) is str and type(attribute) is str):
            raise ValueError("a name is not text")
        name = Name(module, attribute)
        if str(name) not in _HARMLESS and module.partition(".")[0] not in self.packages:
            raise Refused(
                f"refused: it names {name}, and only names of {', '.join(self.packages)} belong in such a batch; "
                "nothing of it was run"
            )
        return name

    def made(self, of: Any, arguments: Any) -> None:
        if not (isinstance(of, Name) and isinstance(arguments, tuple)):
            raise ValueError("a call is not of a named function")
        if of == Name("collections", "OrderedDict") and not arguments:
            self.stack.append({})
        elif of == Name("_codecs", "encode") and arguments[1:] == ("latin1",):  # bytes, before protocol 3
            self.stack.append(arguments[0].encode("latin1"))
        elif of == Name("__builtin__", "bytes") and not arguments:
            self.stack.append(b"")
        else:
            self.stack.append(Made(of, arguments))

    def do_mark(self) -> None:
        self.marks.append(len(self.stack))

    def do_pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def do_pop_mark(self) -> None:
        self.pop_to_mark()

    def do_dup(self) -> None:
        self.stack.append(self.stack[-1])

    def do_memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def do_get(self, key: int) -> None:
        self.stack.append(self.memo[key])

    do_binput = do_long_binput = do_put
    do_binget = do_long_binget = do_get

    def do_tuple(self) -> None:
        self.stack.append(tuple(self.pop_to_mark()))

    def do_list(self) -> None:
        self.stack.append(self.pop_to_mark())

    def do_frozenset(self) -> None:
        self.stack.append(frozenset(self.pop_to_mark()))

    def do_dict(self) -> None:
        values = self.pop_to_mark()
        self.stack.append(dict(zip(values[::2], values[1::2], strict=True)))

    def do_tuple1(self) -> None:
        self.stack.append((self.pop(),))

    def do_tuple2(self) -> None:
        last, first = self.pop(), self.pop()
        self.stack.append((first, last))

    def do_tuple3(self) -> None:
        last, middle, first = self.pop(), self.pop(), self.pop()
        self.stack.append((first, middle, last))

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        (target.values if isinstance(target, Made) else target).extend(values)

    def do_append(self) -> None:
        self.extend([self.pop()])

    def do_appends(self) -> None:
        self.extend(self.pop_to_mark())

    def do_additems(self) -> None:
        values = self.pop_to_mark()
        self.stack[-1].update(values)

    def update(self, values: list[Any]) -> None:
        target = self.stack[-1]
        entries = target.entries if isinstance(target, Made) else target
        entries.update(zip(values[::2], values[1::2], strict=True))

    def do_setitem(self) -> None:
        value, key = self.pop(), self.pop()
        self.update([key, value])

    def do_setitems(self) -> None:
        self.update(self.pop_to_mark())

    def do_reduce(self) -> None:
        arguments, of = self.pop(), self.pop()
        self.made(of, arguments)

    do_newobj = do_reduce

    def do_newobj_ex(self) -> None:
        named, arguments, of = self.pop(), self.pop(), self.pop()
        self.made(of, arguments)
        if named:
            raise ValueError("a call has named arguments")

    def do_build(self) -> None:
        state = self.pop()
        if not isinstance(self.stack[-1], Made):
            raise ValueError("a state belongs to no object")
        self.stack[-1].state = state

    def do_binpersid(self) -> None:
        """Torch's way to say where the bytes of a tensor are: ("storage", type, key, device, length)."""
        kind, type_, key, *_ = self.pop()
        if kind != "storage" or type(key) is not str:
            raise ValueError("not a storage of torch")
        self.stack.append(Storage(self.storage(key), type_.name))


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}


def _read_torch(data: bytes, packages: Collection[str]) -> Any:
    """The value in a file of torch.save: a zip archive, not compressed, with a pickle and the bytes of each tensor."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        names = set(archive.namelist())
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed")
        (root,) = (name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl"))
        if f"{root}byteorder" in names and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("its bytes are in big-endian order")
        pickled = archive.read(f"{root}data.pkl")
        return read_pickle(pickled, packages, lambda key: archive.read(f"{root}data/{key}"))
    except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, RuntimeError) as error:
        raise ValueError(f"not a file of torch.save: {error}; is it cut off or damaged?") from None


# What numbers are called: by numpy.dtype, by torch.dtype and by torch's storages. bfloat16 is unknown to NumPy.
_DTYPES = {
    **{name: np.dtype(name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("float16", "float32", "float64")},
}
_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
}
_CODE = re.compile(r"[biuf][1248]")


def array(value: Any) -> NDArray[Any]:
    """The numbers of a recorded array of NumPy or tensor of torch. An array of objects becomes one of objects."""
    if isinstance(value, Made):
        name, arguments = value.of.name, value.arguments
        if name == "_rebuild_from_type_v2":  # torch's record of a tensor that has attributes
            function, _, inner, *_ = arguments
            return array(Made(function, inner))
        if name == "_rebuild_tensor_v2":
            storage, offset, size, stride, *_ = arguments
            return _tensor(storage, offset, size, stride)
        if name == "_reconstruct" and isinstance(value.state, tuple):
            _, shape, dtype, is_fortran, data = value.state
            return _numbers(data, dtype, shape, "F" if is_fortran else "C")
        if name == "_frombuffer":
            data, dtype, shape, order = arguments
            return _numbers(data, dtype, shape, order)
    raise ValueError(f"must be an array, got {value.of if isinstance(value, Made) else type(value).__name__}")


def from_bytes(data: bytes, dtype: str, shape: Any) -> NDArray[Any]:
    """An array from its bytes, and the name of its type: int64, torch.float32 and so on."""
    name = dtype.removeprefix("torch.")
    if name == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if name not in _DTYPES:
        raise ValueError(f"numbers of type {dtype!r} are unknown")
    return np.frombuffer(data, _DTYPES[name]).reshape(shape)


def _numbers(data: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not (isinstance(dtype, Made) and str(dtype.of) == "numpy.dtype"):
        raise ValueError("an array has no type")
    code, byte_order = dtype.arguments[0], dtype.state[1] if dtype.state else "|"
    if code == "O8" and isinstance(data, list):
        values = np.empty(len(data), object)
        values[:] = data
        return values.reshape(shape)
    if code[:1] == "U" and code[1:].isdecimal():
        return np.frombuffer(data, np.dtype(byte_order + code)).reshape(shape, order=order)
    if not _CODE.fullmatch(code):
        raise ValueError(f"numbers of type {code!r} are unknown")
    return np.frombuffer(data, np.dtype(byte_order + code)).reshape(shape, order=order)


def _tensor(storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> NDArray[Any]:
    flat = from_bytes(storage.data, _STORAGES.get(storage.kind, storage.kind), -1)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = math.prod(size)
    if min((offset, *size, *stride), default=0) < 0 or count > len(flat) or (count and last >= len(flat)):
        raise ValueError("a tensor goes beyond its bytes")
    view = np.lib.stride_tricks.as_strided(flat[offset:], size, [step * flat.itemsize for step in stride])
    return view if count else np.empty(size, flat.dtype)
