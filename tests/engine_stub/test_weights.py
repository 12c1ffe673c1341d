"""Weights: the hash, the file format, `config.json`, and what is refused."""

import json

import msgspec
import numpy as np
import pytest

from engine_stub.backend import registry
from engine_stub.model import ModelError, jobs
from engine_stub.model.shape import of_directory, of_model
from engine_stub.model.weights import FileTensors, HashedTensors, Recorded, uniform_units
from tests.support import models
from tests.support.models import SHAPE, VOCAB_SIZE, exact_model, job_list, llama_config, save_model, write_safetensors

MASK = (1 << 64) - 1


def splitmix(state):
    """The published generator, in Python integers: the next output of a state."""
    z = state + 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def test_the_reference_is_splitmix64():
    """First outputs for seed 0, as published with the generator."""
    states = [0x9E3779B97F4A7C15 * step & MASK for step in range(3)]
    assert [splitmix(state) for state in states] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_hashed_integers_follow_it():
    key, bound = 0xFEDCBA9876543210, 999
    outputs = [splitmix(key + 0x9E3779B97F4A7C15 * index & MASK) for index in range(50)]
    expected = [((output >> 32) * (2 * bound + 1) >> 32) - bound for output in outputs]
    assert uniform_units(key, 0, 50, bound).tolist() == expected
    assert uniform_units(key, 20, 50, bound).tolist() == expected[20:]


def test_hashed_weights_have_the_variance_of_their_inputs_and_lie_on_the_grid():
    values = HashedTensors(3).tensor("model.layers.0.mlp.down_proj.weight", (300, 1000)).astype(np.float64)
    assert abs(values.mean()) < 1e-3
    assert values.var() * 1000 == pytest.approx(1, rel=0.02)
    assert (values * 4096 == np.rint(values * 4096)).all()


def test_seed_and_name_decide_and_the_digest_covers_both():
    def digest(seed, *names):
        recorded = Recorded(HashedTensors(seed))
        for name in names:
            recorded.tensor(name, (4, 4))
        return recorded.digest()

    assert digest(0, "a", "b") == digest(0, "b", "a")
    assert len({digest(0, "a"), digest(1, "a"), digest(0, "b"), digest(0, "a", "b")}) == 4


def test_float_formats_are_read_exactly(tmp_path):
    values = np.array([[1.0, -2.5, 0.15625], [65504.0, 2.0**-14, 0.0]], dtype=np.float32)
    (tmp_path / "config.json").write_text("{}")
    bfloat = np.array([[1.0, -2.5, 3.0], [2.0**100, 2.0**-120, 0.0]], dtype=np.float32)
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "single": ("F32", values),
            "half": ("F16", values.astype(np.float16)),
            "brain": ("BF16", (bfloat.view(np.uint32) >> np.uint32(16)).astype(np.uint16)),
            "whole": ("I64", np.arange(3)),
            "scalar": ("F32", np.float32(7).reshape(())),
        },
    )
    tensors = FileTensors(tmp_path)
    assert (tensors.tensor("single", (2, 3)) == values).all()
    assert (tensors.tensor("half", (2, 3)) == values).all()
    assert (tensors.tensor("brain", (2, 3)) == bfloat).all()
    assert tensors.tensor("scalar", ()) == 7
    with pytest.raises(ModelError, match="whole is I64; supported: F32, F16, BF16"):
        tensors.tensor("whole", (3,))


def test_a_saved_model_generates_what_the_original_does(tmp_path):
    directory = save_model(tmp_path / "model")
    shape = of_directory(directory)
    assert shape == SHAPE
    loaded = exact_model(shape=shape, source=FileTensors(directory))
    original = exact_model()
    assert loaded.weights.digest == original.weights.digest
    assert jobs.run(loaded, job_list(), 4, 7) == jobs.run(original, job_list(), 4, 7)


def test_shards_are_found_by_their_index_and_must_all_be_there(tmp_path):
    directory = save_model(tmp_path / "model")
    source = HashedTensors(0)
    names = [name for name, _ in SHAPE.tensors()]
    dimensions = dict(SHAPE.tensors())
    (directory / "model.safetensors").unlink()
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in parts.items():
        write_safetensors(directory / file, {name: ("F32", source.tensor(name, dimensions[name])) for name in members})
    weight_map = {name: file for file, members in parts.items() for name in members}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert jobs.run(exact_model(source=FileTensors(directory)), job_list(), 4, 7) == jobs.run(
        exact_model(), job_list(), 4, 7
    )
    index.write_text(json.dumps({"weight_map": weight_map | {"lost.weight": "a.safetensors"}}))
    with pytest.raises(ModelError, match=r"partial weights: no shard has lost\.weight"):
        FileTensors(directory)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (directory / "b.safetensors").unlink()
    with pytest.raises(registry.BackendError, match=r"partial weights, without b\.safetensors"):
        registry.create("numpy", models.config(path=str(directory)))


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    directory = save_model(tmp_path / "model")
    tensors = FileTensors(directory)
    with pytest.raises(ModelError, match=r"no tensor lost\.weight"):
        tensors.tensor("lost.weight", (1,))
    with pytest.raises(ModelError, match=r"model\.norm\.weight: the file has \[32\], config\.json means \[33\]"):
        tensors.tensor("model.norm.weight", (33,))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda raw: b"", "empty"),
        (lambda raw: raw[:4], "cut short"),
        (lambda raw: raw[:40], "cut short"),
        (lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:], "not a safetensors file"),
        (lambda raw: raw[:8] + b"]" + raw[9:], "malformed"),
        (lambda raw: raw.replace(b'"shape"', b'"sharp"', 1), "shape"),
        (lambda raw: raw.replace(b'"shape": [32]', b'"shape": [31]', 1), r"has 128 bytes for shape \[31\]"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, what):
    file = save_model(tmp_path / "model") / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=what):
        read_all(file.parent)


def read_all(directory):
    tensors = FileTensors(directory)
    for name, dimensions in SHAPE.tensors():
        tensors.tensor(name, dimensions)


def test_a_file_that_ends_inside_a_tensor_is_refused(tmp_path):
    file = save_model(tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="ends behind the file"):
        FileTensors(file.parent).tensor("lm_head.weight", (VOCAB_SIZE, 32))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "not a dense Llama"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"num_key_value_heads": 3}, "kv heads 3"),
        ({"hidden_size": "wide"}, "wide"),
    ],
)
def test_configurations_that_are_another_model_are_refused(tmp_path, changes, what):
    (tmp_path / "config.json").write_text(json.dumps(llama_config(SHAPE, **changes)))
    with pytest.raises(ModelError, match=what):
        of_directory(tmp_path)


def test_a_missing_key_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        of_directory(tmp_path)
    config = llama_config(SHAPE)
    del config["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="key 'intermediate_size' is missing"):
        of_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        of_directory(tmp_path)


def test_defaults_of_older_configurations(tmp_path):
    config = llama_config(SHAPE)
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings", "architectures"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = of_directory(tmp_path)
    assert (shape.head_dim, shape.kv_heads, shape.rope_theta, shape.tie_embeddings) == (8, 4, 10_000.0, False)


def test_newer_rope_settings_are_read_from_their_own_mapping(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(llama_config(SHAPE, rope_parameters=rope)))
    shape = of_directory(tmp_path)
    assert shape.rope_theta == 500_000.0
    assert shape.rope_scaling.original_positions == 8192


def test_a_vocabulary_that_contradicts_the_configuration_is_refused(tmp_path):
    save_model(tmp_path / "model")
    with pytest.raises(ModelError, match=f"set model.vocab_size to {VOCAB_SIZE}"):
        of_model(models.config(path=str(tmp_path / "model"), vocab_size=VOCAB_SIZE + 1).model)


def test_tied_embeddings_are_the_output_matrix_too(tmp_path):
    shape = msgspec.structs.replace(SHAPE, tie_embeddings=True)
    assert shape.parameters == SHAPE.parameters - VOCAB_SIZE * 32
    model = exact_model(shape=shape)
    assert (model.weights.head == np.clip(model.weights.embedding, -(2**15), 2**15).T).all()
    directory = save_model(tmp_path / "model", shape)
    assert of_directory(directory) == shape
