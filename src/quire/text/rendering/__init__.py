"""Text to tokens and back: tokenizer, chat template, detokenizer, stop strings.

Light to import: `tokenizers` and `jinja2` are loaded when a model folder is.
"""

from quire.text.rendering.assembler import AssemblerUpdate, OutputAssembler, beam_search_output
from quire.text.rendering.chat_template.template import RESERVED_KWARGS, ChatTemplate
from quire.text.rendering.detokenize import IncrementalDetokenizer, TokenOffsets
from quire.text.rendering.message_check import check_messages
from quire.text.rendering.output import Ending, OutputRenderer, OutputUpdate, TextDelta
from quire.text.rendering.output_reader import OutputReader
from quire.text.rendering.prompt_pieces import PromptPieces
from quire.text.rendering.renderer import Prompt, RenderedPrompt, Renderer, RendersChats
from quire.text.rendering.request import PromptAdapters, RequestRenderer, truncated
from quire.text.rendering.stop import StopDelta, StopMatcher
from quire.text.rendering.tokenizer import Tokenizer
from quire.text.rendering.tokenizer_face import TokenizerFace

__all__ = [
    "RESERVED_KWARGS",
    "AssemblerUpdate",
    "ChatTemplate",
    "Ending",
    "IncrementalDetokenizer",
    "OutputAssembler",
    "OutputReader",
    "OutputRenderer",
    "OutputUpdate",
    "Prompt",
    "PromptAdapters",
    "PromptPieces",
    "RenderedPrompt",
    "Renderer",
    "RendersChats",
    "RequestRenderer",
    "StopDelta",
    "StopMatcher",
    "TextDelta",
    "TokenOffsets",
    "Tokenizer",
    "TokenizerFace",
    "beam_search_output",
    "check_messages",
    "truncated",
]
