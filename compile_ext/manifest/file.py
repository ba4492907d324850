"""The file format of a manifest: JSON that a person can read, checked field by field when it is
read.

A tensor is ``{"dtype", "shape", "strides"}`` and, of a view, ``"offset"``; a dtype
``{"torch": "bfloat16"}``; a number that depends on M ``{"size": "M//2"}``; all else stands for
itself. Nothing in a file is run: an expression is read by ``ops/call_site.py``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from compile_ext.manifest.checked import Fault, Fields, expression, items, number, text
from compile_ext.manifest.manifest import Manifest, ManifestSite, NotCovered
from compile_ext.manifest.schema import check_call
from compile_ext.ops.call_site import CallSite, Size, SizeValue, TensorForm, Value
from compile_ext.ops.errors import ManifestError
from compile_ext.ops.replace_file import replace_text

FORMAT, VERSION = "compile_ext manifest", 1
MOST_TOKENS = 2**31 - 1
_FIX = "collect the model again, or mend the file"


def write(path: Path, manifest: Manifest) -> None:
    """Raises ManifestError."""
    try:
        replace_text(path, to_text(manifest))
    except OSError as error:
        fix = "make it writable, or name another one"
        wanted = "a file that can be written"
        raise ManifestError(str(path), f"{error}", wanted, fix) from error


def read(path: Path) -> Manifest:
    """Raises ManifestError."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("a folder or a device")
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ManifestError(str(path), f"{error}", "a file in UTF-8", _FIX) from error
    return from_text(content, str(path))


def to_text(manifest: Manifest) -> str:
    from compile_ext import __version__

    content = {
        "format": FORMAT,
        "version": VERSION,
        "package": __version__,
        "sites": [_site_out(x) for x in manifest.sites],
        "not_covered": [
            {"op": x.op, "modules": list(x.modules), "reason": x.reason}
            for x in manifest.not_covered
        ],
    }
    return _pretty(content, "") + "\n"


def _pretty(value: Any, indent: str) -> str:
    """JSON with what fits into 100 columns on one line: a tensor, a list of modules."""
    flat = json.dumps(value, allow_nan=False)
    if not isinstance(value, (dict, list)) or (len(indent) + len(flat) <= 90 and indent):
        return flat
    inner = indent + " "
    if isinstance(value, list):
        lines = [inner + _pretty(x, inner) for x in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]" if lines else "[]"
    lines = [f"{inner}{json.dumps(k)}: {_pretty(x, inner)}" for k, x in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def from_text(content: str, where: str) -> Manifest:
    """Raises ManifestError, which names ``where``."""
    try:
        return _manifest(json.loads(content, object_pairs_hook=_once, parse_constant=_no_number))
    except Fault as error:
        raise ManifestError(where, error.found, error.wanted, error.fix or _FIX) from error
    except (ValueError, RecursionError) as error:  # the last of a deep nesting
        raise ManifestError(where, f"{error}", "a JSON file", _FIX) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(x for x in names if names.count(x) > 1)
        raise Fault(f"two fields {twice!r} in one object", "one of each")
    return found


def _no_number(name: str) -> Any:
    raise Fault(name, "a finite number")


def _manifest(content: Any) -> Manifest:
    fields = Fields(content, "the file")
    if fields.take("format") != FORMAT:
        raise Fault("another kind of JSON file", f'"format": "{FORMAT}"')
    version = fields.take("version")
    if type(version) is not int or version != VERSION:
        fix = "use the release of compile_ext that wrote it, or a newer one"
        raise Fault(f"version {version!r}", f"version {VERSION}", fix)
    text(fields.take("package"), "package")
    sites = [_site_in(x, f"sites[{i}]") for i, x in items(fields.take("sites"), "sites")]
    missing = [
        _missing_in(x, f"not_covered[{i}]")
        for i, x in items(fields.take("not_covered"), "not_covered")
    ]
    fields.end()
    return Manifest(tuple(sites), tuple(missing))


def _site_out(site: ManifestSite) -> dict[str, Any]:
    call = site.call
    return {
        "op": call.op,
        "n": call.n,
        "k": call.k,
        "m": list(call.m),
        "modules": list(site.modules),
        "arguments": {name: _value_out(x) for name, x in call.arguments},
    }


def _site_in(content: Any, at: str) -> ManifestSite:
    fields = Fields(content, at)
    op = text(fields.take("op"), f"{at}.op")
    n, k = (
        None if x is None else number(x, f"{at}.{name}")
        for name in ("n", "k")
        for x in (fields.take(name),)
    )
    m = _range(fields.take("m"), f"{at}.m")
    modules = _texts(fields.take("modules"), f"{at}.modules")
    arguments = Fields(fields.take("arguments"), f"{at}.arguments").content
    fields.end()
    values = tuple((name, _value_in(x, f"{at}.{name}")) for name, x in arguments.items())
    call = CallSite(op, m, values, n, k)
    check_call(call, at)
    return ManifestSite(call, modules)


def _range(content: Any, at: str) -> tuple[int, int | None]:
    ends = [x for _, x in items(content, at)]
    if len(ends) != 2:
        raise Fault(f"{at} = {content!r}", "the first and the last number of tokens, or null")
    low = number(ends[0], at, MOST_TOKENS)
    high = None if ends[1] is None else number(ends[1], at, MOST_TOKENS)
    if high is not None and low > high:
        raise Fault(f"{at} = {content!r}", "the first number of tokens before the last")
    return low, high


def _missing_in(content: Any, at: str) -> NotCovered:
    fields = Fields(content, at)
    op, reason = (text(fields.take(name), f"{at}.{name}") for name in ("op", "reason"))
    modules = _texts(fields.take("modules"), f"{at}.modules")
    fields.end()
    return NotCovered(op, modules, reason)


def _texts(content: Any, at: str) -> tuple[str, ...]:
    return tuple(text(x, f"{at}[{i}]") for i, x in items(content, at))


def _value_out(value: Value) -> Any:
    if isinstance(value, TensorForm):
        form = {"dtype": value.dtype, "shape": list(value.shape), "strides": list(value.strides)}
        return form if value.offset == 0 else {**form, "offset": value.offset}
    if isinstance(value, SizeValue):
        return {"size": value.size}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    return [_value_out(x) for x in value] if isinstance(value, tuple) else value


def _value_in(content: Any, at: str) -> Value:
    if isinstance(content, list):
        return tuple(_value_in(x, f"{at}[{i}]") for i, x in enumerate(content))
    if isinstance(content, float) and not math.isfinite(content):  # 1e999
        raise Fault(f"{at} = {content!r}", "a finite number")
    if not isinstance(content, dict):
        return number(content, at, 2**63 - 1, -(2**63)) if type(content) is int else content
    fields = Fields(content, at)
    if "size" in content:
        value: Value = SizeValue(expression(fields.take("size"), at))
    elif "torch" in content:
        value = getattr(torch, _dtype(fields.take("torch"), at))
    else:
        value = _form(fields, at)
    fields.end()
    return value


def _form(fields: Fields, at: str) -> TensorForm:
    dtype = _dtype(fields.take("dtype"), f"{at}.dtype")
    shape, strides = (
        tuple(_size(x, f"{at}.{name}[{i}]") for i, x in items(fields.take(name), f"{at}.{name}"))
        for name in ("shape", "strides")
    )
    if len(shape) != len(strides):
        raise Fault(f"{at} with {len(shape)} sizes and {len(strides)} strides", "as many of each")
    offset = _size(fields.take("offset"), f"{at}.offset") if "offset" in fields.content else 0
    return TensorForm(dtype, shape, strides, offset)


def _dtype(content: Any, at: str) -> str:
    name = text(content, at)
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise Fault(f"{at} = {name!r}", "a dtype of the torch that is installed")
    return name


def _size(content: Any, at: str) -> Size:
    return expression(content, at) if isinstance(content, str) else number(content, at)
