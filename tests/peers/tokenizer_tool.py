"""Runs with the peers' interpreter, which has `tokenizers`: one JSON request on stdin, the answer on stdout.

| request | answer |
|---|---|
| `{"make": DIR, "text": TRAINING_TEXT}` | `{"vocab_size": n, "special_ids": [end of sequence, turn]}` |
| `{"dir": DIR, "encode": [text, ...]}` | `[[id, ...], ...]` without special tokens added |
| `{"dir": DIR, "decode": [[id, ...], ...]}` | `[text, ...]`, special tokens left out |

Every token is printable ASCII: text decoded token by token is the same as text decoded at once, so a router's
incremental output can be compared with it byte by byte.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, TURN = "<|end|>", "<|turn|>"
VOCAB_SIZE = 600
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def make(directory, text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The byte-level alphabet writes the space and the newline as letters of their own.
    alphabet = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter in "ĠĊ" or "!" <= letter <= "~"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END, TURN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size()}
    (directory / "config.json").write_text(json.dumps(model))
    special_ids = [tokenizer.token_to_id(END), tokenizer.token_to_id(TURN)]
    return {"vocab_size": tokenizer.get_vocab_size(), "special_ids": special_ids}


def answer(request):
    if "make" in request:
        return make(Path(request["make"]), request["text"])
    tokenizer = Tokenizer.from_file(str(Path(request["dir"]) / "tokenizer.json"))
    if "encode" in request:
        return [tokenizer.encode(text, add_special_tokens=False).ids for text in request["encode"]]
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in request["decode"]]


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
