"""What is done to a valid call to make it hostile: to values, to arrays, to views of them, and to the call as a whole.

Every mutation takes the random numbers and the call, changes the call in place, and says what it did; None: it found
nothing to do. What a caller promises (`Leaf.trusted`) is never broken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fuzz.calls import Call, chance, pick
from fuzz.memory import Leaf, leaves

DTYPES = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64", "bool", "complex64")  # fmt: skip
OBJECTS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31 - 1, 2**31, -(2**31), 2**32 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**70),
    0.0, 1.5, float("nan"), float("inf"), 1j, "", "cpu", "4", b"8", (), [], {}, [1, 2], (3,), {4: 5}, (None, None),
    object(), torch.float32, torch.device("cpu"), np.int64(4), np.float32(4), np.arange(3), range(2), int, len,
)  # fmt: skip
INTEGERS = (-(2**63), -(2**31), -129, -1, 0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 64, 127, 128, 129, 255, 256, 257, 583, 584,
            585, 4095, 4096, 32768, 65535, 65536, 65537, 2**30, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1)  # fmt: skip

Mutation = Callable[[np.random.Generator, Call], "str | None"]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where leaves and plain values are in a tree."""
    if isinstance(value, dict):
        return [p for key, item in value.items() for p in _paths(item, (*path, key))]
    if isinstance(value, (tuple, list)) and any(True for _ in leaves(value)):
        return [p for i, item in enumerate(value) for p in _paths(item, (*path, i))]
    return [path]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The tree with something else at the path."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: _with(value[key], tuple(rest), new)}
    items = [_with(item, tuple(rest), new) if i == key else item for i, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in path)


def _named_leaves(call: Call, *, hostile: bool = False) -> list[tuple[str, Leaf]]:
    """Leaves of the call; with `hostile` those whose values are no promise."""
    found = [(p, _at(call.arguments, p)) for p in _paths(call.arguments)]
    return [(_name(p), x) for p, x in found if isinstance(x, Leaf) and not (hostile and x.trusted)]


# ---------------------------------------------------------------------------------------------------- values


def _range_of(dtype: np.dtype) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _interesting(call: Call) -> list[int]:
    """Numbers at which something ends in this call: sizes of its tensors and its integers."""
    sizes = {n for _, x in _named_leaves(call) for n in (*x.array.shape, x.array.size)}
    sizes |= {v for v in call.arguments.values() if isinstance(v, int) and abs(v) < 2**40}
    near = {n + d for n in sizes for d in (-1, 0, 1)}
    always = {-2, -1, 0, 1, 2**15 - 1, 2**15, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**33 + 5, 2**62, -(2**63)}
    return sorted(near | always)


def values(rng: np.random.Generator, call: Call) -> str | None:
    candidates = [(n, x) for n, x in _named_leaves(call, hostile=True) if x.array.size and x.array.dtype.kind in "iub"]
    candidates = [(n, x) for n, x in candidates if not x.pool]
    if not candidates:
        return None
    name, leaf = pick(rng, candidates)
    array, (low, high) = leaf.array, _range_of(leaf.array.dtype)
    how = pick(rng, ("edges", "edges", "edges", "constant", "garbage", "duplicates", "shuffle", "zeros", "huge"))
    share = pick(rng, (0.02, 0.2, 0.6, 1.0))
    where = rng.random(array.shape) < share
    where.reshape(-1)[int(rng.integers(array.size))] = True
    numbers = [n for n in _interesting(call) if low <= n <= high] + [low, low + 1, high - 1, high]
    if how == "edges":
        array[where] = np.array([pick(rng, numbers) for _ in range(int(where.sum()))], dtype=array.dtype)
    elif how == "constant":
        array[where] = np.array(pick(rng, numbers), dtype=array.dtype)
    elif how == "garbage":
        noise = np.frombuffer(rng.bytes(array.nbytes), np.uint8)
        array[where] = (noise % 2 if low == 0 and high == 1 else noise).view(array.dtype).reshape(array.shape)[where]
    elif how == "duplicates":
        array[where] = rng.choice(array.reshape(-1), int(where.sum()))
    elif how == "shuffle":
        array[...] = rng.permutation(array.reshape(-1)).reshape(array.shape)
    elif how == "zeros":
        array[where] = 0
    else:
        array[where] = high
    call.racy = True
    return f"{name}: {how} in {int(where.sum())} of {array.size}"


# ---------------------------------------------------------------------------------------------------- arrays


def dtype(rng: np.random.Generator, call: Call) -> str | None:
    name, leaf = pick(rng, _named_leaves(call))
    if leaf.pointers is not None:
        return None
    other = np.dtype(pick(rng, DTYPES))
    with np.errstate(all="ignore"):
        leaf.array = leaf.array.astype(other)
    leaf.shift = 0
    return f"{name}: dtype {other}"


def size(rng: np.random.Generator, call: Call) -> str | None:
    """A dimension longer, shorter or empty; what is added are values that are there."""
    name, leaf = pick(rng, _named_leaves(call))
    if leaf.array.ndim == 0:
        return None
    dim = int(rng.integers(leaf.array.ndim))
    old = leaf.array.shape[dim]
    new = pick(rng, (old + 1, old + 1, max(0, old - 1), max(0, old - 1), 0, 1, 2 * old, old + 16))
    if new == old or (old == 0 and (leaf.trusted or leaf.array.size == 0)):
        return None
    leaf.array = np.ascontiguousarray(np.take(leaf.array, np.arange(new) % max(1, old), axis=dim))
    call.racy = True
    return f"{name}: size {dim} is {new}, not {old}"


def rank(rng: np.random.Generator, call: Call) -> str | None:
    name, leaf = pick(rng, _named_leaves(call))
    array = leaf.array
    how = pick(rng, ("more", "behind", "flat", "first", "scalar"))
    if how == "more":
        leaf.array = array[None]
    elif how == "behind":
        leaf.array = array[..., None]
    elif how == "flat":
        leaf.array = array.reshape(-1)
    elif array.size == 0 or array.ndim == 0:
        return None
    else:
        leaf.array = np.array(array[0] if how == "first" else array.reshape(-1)[0])
    leaf.gap = ()
    return f"{name}: rank {array.ndim} -> {leaf.array.ndim}"


def layout(rng: np.random.Generator, call: Call) -> str | None:
    """Gaps between rows and a shifted beginning: the same values elsewhere."""
    name, leaf = pick(rng, _named_leaves(call))
    leaf.shift = pick(rng, (0, 1, 2, 3, 8))
    if leaf.array.ndim > 1:
        leaf.gap = tuple(int(pick(rng, (0, 1, 3, 16))) for _ in range(leaf.array.ndim - 1))
    return f"{name}: gap {leaf.gap}, shift {leaf.shift}"


# ---------------------------------------------------------------------------------------------------- views


def _overlapping(tensor: torch.Tensor) -> torch.Tensor:
    """Rows upon each other, inside the tensor's own memory."""
    if tensor.dim() < 2 or tensor.numel() == 0:
        return tensor
    return tensor.as_strided(tensor.shape, (1, *tensor.stride()[1:]), tensor.storage_offset())


def _huge(tensor: torch.Tensor) -> torch.Tensor:
    first = tensor.flatten()[:1] if tensor.is_contiguous() else tensor[:1]
    return first.expand(2**40, *first.shape[1:])


VIEWS: tuple[tuple[str, Callable[[torch.Tensor], Any]], ...] = (
    ("transposed", lambda t: t.transpose(0, -1)),
    ("without its first", lambda t: t[1:]),
    ("without its last", lambda t: t[:-1]),
    ("every second", lambda t: t[::2]),
    ("every second column", lambda t: t[..., ::2]),
    ("without its last column", lambda t: t[..., :-1]),
    ("first row, expanded", lambda t: t[:1].expand_as(t)),
    ("first column, expanded", lambda t: t[..., :1].expand_as(t)),
    ("rows upon each other", _overlapping),
    ("expanded in front", lambda t: t.expand(3, *t.shape)),
    ("expanded to 2^40", _huge),
    ("empty", lambda t: t[:0]),
    ("one more dimension", lambda t: t.unsqueeze(-1)),
    ("flattened", lambda t: t.flatten()),
    ("requires grad", lambda t: t.requires_grad_() if t.dtype.is_floating_point else t.detach()),
    ("parameter", lambda t: torch.nn.Parameter(t, requires_grad=False)),
    ("on meta", lambda t: t.to("meta")),
    ("sparse", lambda t: t.to_sparse()),
    ("as bfloat16", lambda t: t.view(torch.bfloat16)),
    ("as float8", lambda t: t.view(torch.float8_e4m3fn)),
    ("as bytes", lambda t: t.view(torch.uint8)),
    ("as int32", lambda t: t.view(torch.int32)),
    ("as bool", lambda t: t.view(torch.bool)),
    ("conjugated", lambda t: t.view(torch.complex64).conj()),
    ("negated", lambda t: torch._neg_view(t)),
    ("as numpy", lambda t: t.numpy()),
    ("as a list", lambda t: t.tolist()),
)


NO_TENSORS = frozenset({"on meta", "sparse", "conjugated", "negated", "as numpy", "as a list"})
"""What the reference, which is written with torch and NumPy, need not take as the operators do."""


def view(rng: np.random.Generator, call: Call) -> str | None:
    name, leaf = pick(rng, _named_leaves(call))
    what, function = pick(rng, VIEWS)
    if leaf.array.ndim == 0 or leaf.array.size > 1 << 20:
        return None
    # Making a list or a sparse tensor of that would take hours.
    if any(function is _huge for _, function in leaf.views):
        return None
    # A list of addresses, or half of one, is another promise.
    if leaf.trusted and what.startswith("as "):
        return None
    leaf.views.append((what, function))
    call.racy = True
    if what in NO_TENSORS:
        call.reference = None
    return f"{name}: {what}"


# ---------------------------------------------------------------------------------------------------- the call


def alias(rng: np.random.Generator, call: Call) -> str | None:
    """Two arguments in the same memory."""
    found = [(n, x) for n, x in _named_leaves(call, hostile=True) if x.shares is None]
    if len(found) < 2:
        return None
    (name, one), (other, two) = (found[i] for i in rng.permutation(len(found))[:2])
    if any(x.shares is one for _, x in found) or one.place != two.place:
        return None
    one.shares = two
    one.views = []
    if one.array.dtype != two.array.dtype and chance(rng, 0.7):
        wanted = torch.from_numpy(np.zeros(0, one.array.dtype)).dtype
        one.views.append((f"as {wanted}", lambda t: t.view(wanted)))
    shape = one.array.shape
    if one.array.size and chance(rng, 0.8):
        one.views.append((f"its first {list(shape)}", lambda t: t.flatten()[: int(np.prod(shape))].view(shape)))
    call.racy = call.aliased = True
    return f"{name}: in the memory of {other}"


def swap(rng: np.random.Generator, call: Call) -> str | None:
    paths = [p for p in _paths(call.arguments) if not (isinstance(x := _at(call.arguments, p), Leaf) and x.trusted)]
    if len(paths) < 2:
        return None
    one, two = (paths[i] for i in rng.permutation(len(paths))[:2])
    first, second = _at(call.arguments, one), _at(call.arguments, two)
    if {one[0], two[0]} & call.bounded:
        return None
    # What may be written is said by the place.
    written = [isinstance(x, Leaf) and x.written for x in (second, first)]
    for x, may_write in zip((first, second), written, strict=True):
        if isinstance(x, Leaf):
            x.written = may_write
    call.arguments = _with(_with(call.arguments, one, second), two, first)
    call.racy = True
    return f"{_name(one)} and {_name(two)} swapped"


def number(rng: np.random.Generator, call: Call) -> str | None:
    """Another integer, or a flag turned."""
    paths = [p for p in _paths(call.arguments) if isinstance(_at(call.arguments, p), int)]
    if not paths:
        return None
    path = pick(rng, paths)
    old = _at(call.arguments, path)
    if path[0] in call.bounded:
        new: int = pick(rng, (-1, 0, 1, 2, old - 1, old + 1))
    elif isinstance(old, bool):
        new = not old
    else:
        new = pick(rng, (*INTEGERS, old - 1, old + 1, 2 * old, -old))
    call.arguments = _with(call.arguments, path, new)
    return f"{_name(path)}: {new}, not {old}"


def replaced(rng: np.random.Generator, call: Call) -> str | None:
    """Something that is no such thing at all, in the place of an argument or of a part of one."""
    tops = [(name,) for name in call.arguments]
    path = pick(rng, (*_paths(call.arguments), *tops))
    new = pick(rng, OBJECTS)
    old = _at(call.arguments, path)
    if isinstance(new, (np.ndarray, np.generic)):
        call.reference = None
    if isinstance(new, np.ndarray) and any(x.trusted for x in leaves(old)):
        return None
    if path[0] in call.bounded and isinstance(new, (int, np.integer)) and new > 1:
        return None
    call.arguments = _with(call.arguments, path, new)
    return f"{_name(path)}: {new!r}"


def dropped(rng: np.random.Generator, call: Call) -> str | None:
    name = pick(rng, list(call.arguments))
    del call.arguments[name]
    return f"without {name}"


def added(rng: np.random.Generator, call: Call) -> str | None:
    name = pick(rng, ("stream", "block_size", "out", "dim", "skip_io"))
    if name in call.arguments:
        return None
    call.arguments[name] = pick(rng, OBJECTS)
    return f"{name}: {call.arguments[name]!r} added"


MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (values, 10),
    (dtype, 3),
    (size, 4),
    (rank, 2),
    (layout, 4),
    (view, 5),
    (alias, 2),
    (swap, 1),
    (number, 4),
    (replaced, 3),
    (dropped, 1),
    (added, 1),
)
_POOL = [mutation for mutation, weight in MUTATIONS for _ in range(weight)]


def mutate(rng: np.random.Generator, call: Call) -> None:
    """None to three mutations; a fifth of all calls stays valid."""
    for _ in range(pick(rng, (0, 1, 1, 2, 3))):
        if not call.arguments or not _named_leaves(call):
            return
        done = pick(rng, _POOL)(rng, call)
        if done:
            call.mutations.append(done)
    call.positional = chance(rng, 0.2)
