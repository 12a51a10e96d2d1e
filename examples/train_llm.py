"""A small language model trained on this repository's documentation: ``python examples/train_llm.py [folder]``.

Takes about two minutes on a CPU. The loss of held-out pages falls from 6.9 (the logarithm of the vocabulary) to below
4.0 nats a token; the weights, tokenizer and configuration lie in ``<folder>/out/weights`` in the Hugging Face layout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import ridgeline as rl
from ridgeline.llm.data.tokens import fingerprint, write_token_file

DOCS = Path(__file__).resolve().parent.parent / "docs"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 128,
    "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
STEPS, HELD_OUT_LOSS = 400, 4.0


def prepare(folder: Path) -> None:
    """Write a tokenizer trained on the pages, two token files (every eighth page held out) and ``config.json``."""
    pages = [page.read_text() for page in sorted(DOCS.glob("**/*.md"))]
    documents = [section for page in pages for section in page.split("\n## ") if len(section) > 200]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], special_tokens=["<|endoftext|>"],
                                  initial_alphabet=sorted(alphabet), show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    known = fingerprint(folder / "tokenizer.json")
    for name, part in (("train", [d for i, d in enumerate(documents) if i % 8]), ("held-out", documents[::8])):
        encoded = (tokenizer.encode(document).ids for document in part)
        write_token_file(folder / f"{name}.bin", encoded, vocab_size=CONFIG["vocab_size"], eos=0, tokenizer=known)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))


def settings(folder: Path, steps: int = STEPS) -> dict[str, object]:
    return {
        "model": str(folder / "config.json"), "out": str(folder / "out"), "steps": steps, "log_every": 20,
        "tokenizer": str(folder / "tokenizer.json"), "data": {"tokens": str(folder / "train.bin")},
        "batch": {"length": 128, "sequences": 16, "micro": 16}, "precision": {"compute": "float32"},
        "optimizer": {"kind": "muon", "lr": 3e-3, "muon_lr": 0.02, "warmup": 20, "weight_decay": 0.05},
        "evaluation": {"tokens": str(folder / "held-out.bin"), "every": 100, "sequences": 48},
        "save_dtype": "float32",
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "small-model")
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    trained = rl.llm.train(settings(folder), say=print)
    if trained.evaluations:
        found = trained.evaluations[-1][1]
        print(f"held-out loss {found:.3f}, expected below {HELD_OUT_LOSS}; weights in {trained.weights}")
        if found >= HELD_OUT_LOSS:
            sys.exit(1)


if __name__ == "__main__":
    main()
