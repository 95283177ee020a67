"""Argument checks of the reference operators: a message names the argument, what was expected, what came."""

from __future__ import annotations

import operator

import torch


def wrong_type(name: str, expected: str, got: object) -> TypeError:
    return TypeError(f"{name}: expected {expected}, got {got}")


def wrong_value(name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {got}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...] = (), ndims: tuple[int, ...] = ()) -> None:
    """A torch tensor of one of `dtypes` and one of the ranks `ndims` (empty: any)."""
    if not isinstance(tensor, torch.Tensor):
        raise wrong_type(name, "a torch.Tensor", type(tensor).__name__)
    if dtypes and tensor.dtype not in dtypes:
        raise wrong_type(name, " or ".join(dtype_name(d) for d in dtypes), dtype_name(tensor.dtype))
    if ndims and tensor.dim() not in ndims:
        dims = " or ".join(str(n) for n in ndims)
        raise wrong_value(name, f"a tensor of {dims} dimension(s)", f"shape {tuple(tensor.shape)}")


def check_device(name: str, tensor: torch.Tensor, device: torch.device, owner: str) -> None:
    if tensor.device != device:
        raise wrong_value(name, f"device {device} (that of {owner})", f"device {tensor.device}")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], letters: str) -> None:
    if tuple(tensor.shape) != shape:
        raise wrong_value(name, f"shape {shape} = {letters}", f"shape {tuple(tensor.shape)}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise wrong_value(name, "a contiguous tensor", f"shape {tuple(tensor.shape)} with strides {tensor.stride()}")


def check_unit_columns(name: str, tensor: torch.Tensor) -> None:
    """A 2-D tensor whose rows are dense; the row stride is free. Strides of empty tensors mean nothing."""
    if tensor.numel() > 0 and tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise wrong_value(name, "a column stride of 1", f"strides {tensor.stride()}")


def check_separate_rows(name: str, tensor: torch.Tensor) -> None:
    """An output's rows may lie apart but not upon each other."""
    check_unit_columns(name, tensor)
    if tensor.numel() > 0 and tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise wrong_value(name, f"a row stride of at least {tensor.shape[1]}", f"strides {tensor.stride()}")


def check_at_least(name: str, tensor: torch.Tensor, count: int, of: str = "elements") -> None:
    """At least `count` elements of the first dimension."""
    if tensor.shape[0] < count:
        raise wrong_value(name, f"at least {count} {of}", tensor.shape[0])


def check_bool(name: str, value: object) -> bool:
    """A flag: a bool, or the 0 or 1 that C callers send."""
    if not isinstance(value, (bool, int)):
        raise wrong_type(name, "a bool", type(value).__name__)
    return bool(value)


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """A Python integer in [low, high]; bool is refused because it is nearly always a misplaced flag."""
    if isinstance(value, bool):
        raise wrong_type(name, "an int", "bool")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(name, "an int", type(value).__name__) from None
    if number < low or (high is not None and number > high):
        raise wrong_value(name, f"an int >= {low}" if high is None else f"an int in [{low}, {high}]", number)
    return number
