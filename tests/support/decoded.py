"""vLLM messages as the compiled decoder reads them, held against the reference, and the golden ones."""

import msgspec

from gateway.wire.vllm.outputs import decode_compiled, decode_outputs
from tests.support.wire import check, recorded, vllm_made

PREFILL = {"num_prompt_tokens": 30, "num_computed_tokens": 30, "num_cached_tokens": 16}
GOLDEN = [m.raw[m.body or 0] for m in recorded() if m.direction == "engine->frontend"]
GOLDEN += [frames[0] for frames in vllm_made().values()]


def columns(batch):
    """A batch field by field, with the types of the numbers; whether a column is a list or a tuple makes no difference."""
    fields = msgspec.structs.asdict(batch)
    return {
        name: repr([tuple(cell) if type(cell) is list else cell for cell in value])
        if isinstance(value, list | tuple)
        else repr(value)
        for name, value in fields.items()
    }


def decode(payload):
    """Decoded in C, or None; compared with the reference."""
    got = decode_compiled(payload)
    if got is not None:
        check(got)
        wanted = decode_outputs(payload, [payload])
        assert type(got) is type(wanted), payload.hex()
        assert columns(got) == columns(wanted), payload.hex()
    return got
