"""A tokenizer of one token a character, and a tiny model that knows them, in a folder."""

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from lsverify import models

SIGNS = ["</s>", "<unk>", "\n", *" abcdefghijklmnopqrstuvwxyz[]:.,-_()ABCDEFGHIJKLMNOPT"]


def letters():
    made = Tokenizer(WordLevel({sign: i for i, sign in enumerate(SIGNS)}, unk_token="<unk>"))
    made.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def lettered_llama(folder):
    models.build("llama", seed=4).save_pretrained(folder)
    letters().save_pretrained(folder)
    return str(folder)
