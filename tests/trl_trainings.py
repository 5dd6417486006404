"""Tiny real GRPO trainings of TRL on the CPU: everything that one needs, made offline."""

import contextlib
import warnings

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from lsverify.models import build

OPTIONS = {
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 5,
    "save_strategy": "no",
    "logging_steps": 1,
}


def tokenizer(size):
    """A word for each id of the vocabulary."""
    words = {f"w{i}": i for i in range(size)}
    fast = Tokenizer(WordLevel(words, unk_token="w2"))
    fast.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="w0", eos_token="w1", unk_token="w2"
    )


def reward(completion_ids, **_):
    """The share of low ids; differs within a group."""
    return [sum(token < 40 for token in ids) / len(ids) + len(ids) / 10 for ids in completion_ids]


def given(arch="llama", **fields):
    """What a training starts from: model, dataset, reward, tokenizer."""
    model = build(arch, seed=0, dtype="float32", **fields)
    prompts = ["w7 w8 w9", "w11 w12 w13 w14 w15", "w5", "w30 w31"]
    return {
        "model": model,
        "dataset": Dataset.from_dict({"prompt": prompts}),
        "reward": reward,
        "tokenizer": tokenizer(model.config.get_text_config().vocab_size),
    }


@contextlib.contextmanager
def quiet():
    """TRL's and the library's own deprecations are no errors of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
