"""Ops that are defined in a test, with a true or a false contract, and how a refusal reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.library import Library, register_fake

from compile_ext.ops import OpContract, register_contract, registry
from compile_ext.ops.errors import ContractError
from compile_ext.testing import check_contract

NAMESPACE = "check_contract_tests"
Define = Callable[..., OpOverload]
AssertFalse = Callable[..., ContractError]


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Iterator[Define]:
    """``(schema, function, contract, fake=None)``: an op of a library that goes with the test."""
    monkeypatch.setattr(registry, "_CONTRACTS", dict(registry._CONTRACTS))
    library = Library(NAMESPACE, "DEF")

    def make(
        schema: str,
        run: Callable[..., Any],
        contract: OpContract | None = None,
        fake: Callable[..., Any] | None = None,
    ) -> OpOverload:
        name = schema.split("(")[0]
        library.define(schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        if fake is not None:
            register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        if contract is not None:
            register_contract(op, contract)
        return op

    yield make
    library._destroy()


@pytest.fixture
def assert_false() -> AssertFalse:
    """``(op, inputs, found, wanted, fix)``: the check says that a claim is false, in these words;
    ``found`` and ``wanted`` are patterns."""

    def check(op: OpOverload, inputs: Any, found: str, wanted: str, fix: str = "") -> ContractError:
        with pytest.raises(ContractError) as raised:
            check_contract(op, inputs)
        error = raised.value
        assert error.where == f"check_contract({op})"
        assert re.search(found, error.found), error.found
        assert re.search(wanted, error.wanted), error.wanted
        assert fix in error.fix
        return error

    return check
