"""The part of one rank that outlives the process, kept in step with the state store.

Without a store it is only memory. A write that fails is logged and counted: the rank goes on, it
just can't be re-attached after a restart.
"""

from dataclasses import dataclass

from gateway.config.schema import Group
from gateway.edges.engine_link.channel import Addresses
from gateway.edges.engine_link.env import LinkEnv
from gateway.edges.state_store import FORMAT, CorruptRecordError, RankRecord
from gateway.types import Protocol


@dataclass(slots=True)
class RankMemory:
    """Incarnation counter, and what re-attaching needs: all addresses and the registration as received."""

    env: LinkEnv
    group: Group
    index: int
    incarnation: int = 0
    addresses: Addresses | None = None
    is_ready: bool = False
    registration: bytes | None = None

    def load(self) -> bool:
        """Take over the record of an earlier process; True when it names sockets to bind again."""
        store = self.env.store
        if store is None:
            return False
        try:
            record = store.load(self.group.name, self.index)
        except CorruptRecordError as error:
            self._fault("corrupt", str(error))
            return False
        if record is None:
            return False
        if self._identity_of(record) != self._own_identity():
            self._fault("foreign", f"record is of {self._identity_of(record)}, configured is {self._own_identity()}")
            return False
        self.incarnation = record.incarnation
        if record.input_address is None or record.output_address is None:
            return False
        self.addresses = Addresses(
            record.input_address,
            record.output_address,
            record.coordinator_input_address,
            record.coordinator_output_address,
        )
        self.is_ready, self.registration = record.is_ready, record.registration
        return True

    def begin(self, addresses: Addresses) -> None:
        """A handshake was answered with these addresses."""
        self.addresses = addresses
        self.is_ready, self.registration = False, None
        self.save()

    def forget(self) -> None:
        """Nothing to re-attach to; the incarnation counter stays."""
        self.addresses = self.registration = None
        self.is_ready = False
        self.save()

    def save(self) -> None:
        """Write the record."""
        store = self.env.store
        if store is None:
            return
        group, index, engine_index, protocol = self._own_identity()
        input_, output, coordinator_input, coordinator_output = self.addresses or (None, None, None, None)
        record = RankRecord(
            format=FORMAT,
            group=group,
            index=index,
            engine_index=engine_index,
            protocol=protocol,
            incarnation=self.incarnation,
            input_address=input_,
            output_address=output,
            coordinator_input_address=coordinator_input,
            coordinator_output_address=coordinator_output,
            is_ready=self.is_ready,
            registration=self.registration,
        )
        try:
            store.save(record)
        except OSError as error:
            self._fault("not_written", str(error))

    def _own_identity(self) -> tuple[str, int, int, Protocol]:
        return self.group.name, self.index, self.group.start_index + self.index, self.group.protocol

    @staticmethod
    def _identity_of(record: RankRecord) -> tuple[str, int, int, Protocol]:
        return record.group, record.index, record.engine_index, record.protocol

    def _fault(self, kind: str, problem: str) -> None:
        self.env.counters.state_faults.add(kind)
        self.env.log.warning(
            "state_record_ignored", kind=kind, group=self.group.name, index=self.index, problem=problem
        )
