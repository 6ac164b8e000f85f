"""Random histories of accounts, identities and permissions, against a model."""

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stead.errors import MachineNotFound, SteadError
from stead.identity.callers import Caller
from stead.identity.errors import IdentityNotFound, PermissionExists, PermissionNotFound, TokenNotFound
from stead.identity.identities import Permission
from stead.store.database import open_database
from support.accounts import NOWHERE, Installation, T
from support.databases import put_database


class Histories(RuleBasedStateMachine):
    """Model-based test: two accounts, compared with dictionaries of secrets and permissions."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = contextlib.ExitStack()
        folder = self.exits.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.runner = self.exits.enter_context(asyncio.Runner())
        self.path = Path(folder) / "stead.db"
        self.identities: dict[str, str] = {}
        self.secrets: dict[str, tuple[str, str]] = {}
        """All tokens, revoked ones included: id and identity."""
        self.revoked: set[str] = set()
        self.permissions: dict[tuple[str, str], tuple[str, ...] | None] = {}
        self.gone: set[str] = set()

    @initialize()
    def begin(self) -> None:
        self.run(put_database(self.path))
        self.here = Installation(self.path, self.run(open_database(self.path)))
        self.accounts = [self.run(self.here.accounts.create(name)).id for name in ("one", "two")]
        for number in range(4):
            self.here.machine(self.accounts[number % 2], f"m{number}")

    def teardown(self) -> None:
        if hasattr(self, "here"):
            self.run(self.here.close())
        self.exits.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def attempt(self, work: Coroutine[Any, Any, T]) -> T | type[SteadError]:
        try:
            return self.run(work)
        except SteadError as error:
            return type(error)

    def pick(self, data: st.DataObject) -> tuple[str, str]:
        """An account, and an identity that may belong to the other account or be deleted."""
        known = [*self.identities, *self.gone, NOWHERE]
        return data.draw(st.sampled_from(self.accounts)), data.draw(st.sampled_from(known))

    def sees(self, account: str, identity: str) -> bool:
        return self.identities.get(identity) == account

    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        account = data.draw(st.sampled_from(self.accounts))
        self.identities[self.run(self.here.identities.create(account)).id] = account

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.delete(account, identity))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
            return
        assert result is None
        del self.identities[identity]
        self.gone.add(identity)
        self.permissions = {key: users for key, users in self.permissions.items() if key[0] != identity}

    @rule(data=st.data())
    def create_token(self, data: st.DataObject) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.create_token(account, identity))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
            return
        assert isinstance(result, tuple)
        assert result[1] not in self.secrets
        self.secrets[result[1]] = result[0].id, identity

    @precondition(lambda self: self.secrets)
    @rule(data=st.data())
    def revoke_token(self, data: st.DataObject) -> None:
        account, identity = self.pick(data)
        secret = data.draw(st.sampled_from(list(self.secrets)))
        token, holder = self.secrets[secret]
        result = self.attempt(self.here.identities.revoke_token(account, identity, token))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
        elif holder != identity or secret in self.revoked:
            assert result is TokenNotFound
        else:
            assert result is None
            self.revoked.add(secret)

    users = st.none() | st.lists(st.sampled_from(["root", "alice", "bob"]), unique=True).map(tuple)
    machines = st.sampled_from([f"m{number}" for number in range(5)])

    @rule(data=st.data(), machine=machines, users=users)
    def grant(self, data: st.DataObject, machine: str, users: tuple[str, ...] | None) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.grant(account, identity, machine, users))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
        elif self.here.machines.get(machine) != account:
            assert result is MachineNotFound
        elif (identity, machine) in self.permissions:
            assert result is PermissionExists
        else:
            assert isinstance(result, Permission)
            self.permissions[identity, machine] = users

    @rule(data=st.data(), machine=machines, users=users)
    def update(self, data: st.DataObject, machine: str, users: tuple[str, ...] | None) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.update(account, identity, machine, users))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
        elif (identity, machine) not in self.permissions:
            assert result is PermissionNotFound
        else:
            self.permissions[identity, machine] = users

    @rule(data=st.data(), machine=machines)
    def revoke(self, data: st.DataObject, machine: str) -> None:
        account, identity = self.pick(data)
        result = self.attempt(self.here.identities.revoke(account, identity, machine))
        if not self.sees(account, identity):
            assert result is IdentityNotFound
        elif (identity, machine) not in self.permissions:
            assert result is PermissionNotFound
        else:
            del self.permissions[identity, machine]

    @rule(machine=machines)
    def delete_machine(self, machine: str) -> None:
        self.here.machines.pop(machine, None)
        self.run(self.here.identities.delete_machine_permissions(machine))
        self.permissions = {key: users for key, users in self.permissions.items() if key[1] != machine}

    @rule()
    def open_again(self) -> None:
        machines = self.here.machines
        self.run(self.here.close())
        self.here = Installation(self.path, self.run(open_database(self.path)))
        self.here.machines = machines

    @invariant()
    def secrets_are_what_they_were_made_for(self) -> None:
        for secret, (_, identity) in self.secrets.items():
            valid = identity in self.identities and secret not in self.revoked
            expected = Caller(self.identities[identity], identity) if valid else None
            assert self.run(self.here.callers.authenticate(secret)) == expected

    @invariant()
    def permissions_are_what_was_granted(self) -> None:
        if not hasattr(self, "here"):
            return
        for account in self.accounts:
            mine = [identity for identity, owner in self.identities.items() if owner == account]
            assert [each.id for each in self.run(self.here.identities.list(account)).items] == mine
        for identity, account in self.identities.items():
            page = self.run(self.here.identities.permissions(account, identity))
            found = {(identity, each.machine): each.allowed_users for each in page.items}
            expected = {key: users for key, users in self.permissions.items() if key[0] == identity}
            assert found == expected
            assert page.total == len(expected)
            assert self.run(self.here.identities.granted(identity)) == {key[1] for key in expected}


Histories.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestHistories = pytest.mark.heavy(Histories.TestCase)
