"""The face of the tokenizer has the meanings that users of transformers know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.bundled import bundled_model_path
from quire.text.rendering import Renderer, TokenizerFace

from .conftest import gpt2_like, llama2_like, llama3_like, write_folder

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXTS = ["The quick brown fox", "naïve café 日本 😀", "a  b\n\tc", ""]

Pair = tuple[TokenizerFace, Any]


@pytest.fixture(scope="module", params=["bundled", "gpt2_like", "llama3_like", "llama2_like"])
def pair(
    request: pytest.FixtureRequest, transformers: Any, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """Ours and theirs of one folder."""
    if request.param == "bundled":
        folder = bundled_model_path()
    else:
        make = {"gpt2_like": gpt2_like, "llama3_like": llama3_like, "llama2_like": llama2_like}
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        if request.param != "llama2_like":
            names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
        folder = write_folder(
            tmp_path_factory.mktemp("face"), make[request.param](), tokenizer_config=names
        )
        (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    face = TokenizerFace.of(Renderer.from_folder(folder))
    assert face is not None
    return face, transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize(
    "call",
    [
        "[t.encode(x) for x in TEXTS]",
        "[t.encode(x, add_special_tokens=False) for x in TEXTS]",
        "t.encode(TEXTS[0], truncation=True, max_length=3)",
        "t(TEXTS)['input_ids']",
        "t(TEXTS[0]).attention_mask",
        "[t.decode(t.encode(x)) for x in TEXTS]",
        "[t.decode(t.encode(x), skip_special_tokens=True) for x in TEXTS]",
        "t.decode(t.encode(TEXTS[0])[-1])",
        "t.batch_decode([t.encode(x) for x in TEXTS])",
        "[t.tokenize(x) for x in TEXTS]",
        "t.convert_ids_to_tokens(t.encode(TEXTS[0]))",
        "t.convert_ids_to_tokens(t.encode(TEXTS[0]), skip_special_tokens=True)",
        "t.convert_ids_to_tokens(5)",
        "t.convert_tokens_to_ids(t.tokenize(TEXTS[0]))",
        "t.convert_tokens_to_ids('no such token at all')",
        "t.get_vocab()",
        "len(t)",
        "t.vocab_size",
        "sorted(t.all_special_ids)",
        "sorted(t.all_special_tokens)",
        "(t.bos_token, t.eos_token, t.pad_token, t.unk_token, t.sep_token)",
        "(t.bos_token_id, t.eos_token_id, t.pad_token_id, t.unk_token_id, t.mask_token_id)",
        "t.get_added_vocab()",
        "t.num_special_tokens_to_add()",
        "t.apply_chat_template(CHAT, tokenize=False)",
        "t.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)",
        "t.apply_chat_template(CHAT, return_dict=True)['input_ids']",
        "t.apply_chat_template(CHAT, return_dict=False)",
        "t.apply_chat_template([CHAT, CHAT[:1]], return_dict=True)['input_ids']",
        "t.apply_chat_template(CHAT, tokenize=False, chat_template='{{ messages|length }}')",
        "t.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)",
        "t.chat_template",
        "t.is_fast",
        "t.truncation_side",
    ],
)
def test_it_answers_as_transformers_does(pair: Pair, call: str) -> None:
    ours, theirs = (eval(call, {"t": t, "TEXTS": TEXTS, "CHAT": CHAT}) for t in pair)
    assert ours == theirs


def test_what_it_does_not_do_is_explained(pair: Pair) -> None:
    face, _ = pair
    for options in ({"return_tensors": "pt"}, {"padding": True}, {"text_pair": "b"}):
        with pytest.raises(RequestError, match=f"{next(iter(options))}=.* cannot be served"):
            face("a", **options)
    with pytest.raises(AttributeError, match=r"pad.*are not padded"):
        face.pad([1])
