"""From rows and a snapshot to the messages that leave a rank, faults included."""

from engine_stub.faults import FaultState, WireForm
from engine_stub.records import Records
from engine_stub.scheduler import Rows
from engine_stub.spoil import distorted, spoil, spoil_rows
from engine_stub.wire.codec import Codec, Load

Frames = list[bytes]


class Addressed(list[bytes]):
    """Frames for another front end than the first."""

    def __init__(self, frames: Frames, client: int) -> None:
        super().__init__(frames)
        self.client = client


class Emitter:
    """Encodes the batches of one rank. `form` is the group's; a fault may override it."""

    def __init__(self, codec: Codec, index: int, form: WireForm, records: Records) -> None:
        self._codec = codec
        self._index = index
        self._form = form
        self._records = records
        self._held: list[Frames] = []

    def batch(self, rows: Rows, load: Load | None, state: FaultState, now: float) -> list[Frames]:
        """The messages of one batch as the faults want it. `rows` may be changed."""
        faults = state.faults
        if faults.drop_tokens_every or faults.never_final:
            spoil_rows(rows, state)
        parts = rows.by_client()
        if len(parts) == 1 and 0 in parts:
            return self._message(rows, distorted(load, faults), state, now)
        # One front end gets the load: the first that has rows in this step, as with the real engine.
        messages: list[Frames] = []
        load = distorted(load, faults)
        for client, part in parts.items():
            messages += [Addressed(frames, client) for frames in self._message(part, load, state, now)]
            load = None
        return messages

    def _message(self, rows: Rows, load: Load | None, state: FaultState, now: float) -> list[Frames]:
        faults = state.faults
        index = self._index if faults.engine_index is None else faults.engine_index
        frames = self._encode(rows, load, index, state, now)
        state.batches += 1
        messages = [frames]
        if faults.garbage_every and state.batches % faults.garbage_every == 0:
            messages = spoil(faults.garbage_kind, frames)
        if faults.duplicate_every and state.batches % faults.duplicate_every == 0:
            messages.append(frames)
        if faults.reorder_every and state.batches % faults.reorder_every == 0 and not self._held:
            self._held = messages
            return []
        return messages + self.flush()

    def flush(self) -> list[Frames]:
        """What `reorder_every` has held back: its turn is after the next batch, or when there is none."""
        held, self._held = self._held, []
        return held

    def scripted(self, rows: Rows, load: Load | None, state: FaultState, now: float) -> Frames:
        """One batch as a test wrote it; of the faults only the wire form applies."""
        return self._encode(rows, load, self._index, state, now)

    def _encode(self, rows: Rows, load: Load | None, index: int, state: FaultState, now: float) -> Frames:
        self._records.batches += 1
        self._records.reported_loads.append(load)
        return self._codec.encode(rows, load, index, state.faults.wire or self._form, now)
