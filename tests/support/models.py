"""Small models, items and stored weights for the tests of `engine_stub.model`; numpy only."""

import json

import numpy as np

from engine_stub.config import Architecture, Model, StubConfig
from engine_stub.model import jobs
from engine_stub.model.arrays import NumpyArrays
from engine_stub.model.exact import ExactModel, load
from engine_stub.model.shape import of_architecture
from engine_stub.model.weights import HashedTensors
from engine_stub.scheduler import SchedulerConfig

VOCAB_SIZE = 200
SMALL = Architecture(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48)
SHAPE = of_architecture(SMALL, VOCAB_SIZE)
NO_TORCH = "torch is not installed (make setup-torch)"
NO_TRITON = "triton is not installed (make setup-torch)"


def prompt(number, length):
    """Unlike token ids for each number."""
    return [(31 * number + 17 * place * place + 7 * place) % VOCAB_SIZE for place in range(length)]


def config(scheduler=None, **model):
    """A configuration of the small model."""
    settings = {"vocab_size": VOCAB_SIZE, "max_model_len": 128, "architecture": SMALL} | model
    return StubConfig(model=Model(**settings), scheduler=scheduler or SchedulerConfig(kv_tokens=256, block_size=4))


def exact_model(arrays=None, shape=SHAPE, source=None, blocks=256, block_size=4, positions=128):
    weights = load(shape, source or HashedTensors(0), arrays or NumpyArrays())
    return ExactModel(weights, blocks=blocks, block_size=block_size, positions=positions)


def item(tokens, start, blocks, **fields):
    """A greedy item with other fields set."""
    made = jobs.item(tokens, start, blocks)
    return made.__class__(**{name: getattr(made, name) for name in made.__struct_fields__} | fields)


def job_list(count=6, new_tokens=6):
    return [jobs.Job(prompt(number, 3 + 5 * number), new_tokens) for number in range(count)]


def write_safetensors(path, tensors, metadata=None):
    """A file as the format describes it: header length, JSON, data. `tensors`: name -> (dtype name, array)."""
    header, data, end = {}, [], 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [end, end + len(raw)]}
        data.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def llama_config(shape, **changes):
    """`config.json` of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        "hidden_act": "silu",
    } | changes


def save_model(directory, shape=SHAPE, source=None, **changes):
    """The hashed weights of a shape as a checkpoint of one float32 file."""
    source = source or HashedTensors(0)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(llama_config(shape, **changes)))
    tensors = {name: ("F32", source.tensor(name, size)) for name, size in shape.tensors()}
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    return directory
