"""Text to tokens and back: tokenizer, chat template, detokenizer, stop strings.

Light to import: `tokenizers` and `jinja2` are loaded when a model folder is.
"""

from quire.rendering.assembler import AssemblerUpdate, OutputAssembler, beam_search_output
from quire.rendering.chat_template.template import RESERVED_KWARGS, ChatTemplate
from quire.rendering.detokenize import IncrementalDetokenizer, TokenOffsets
from quire.rendering.message_check import check_messages
from quire.rendering.output import Ending, OutputRenderer, OutputUpdate, TextDelta
from quire.rendering.output_reader import OutputReader
from quire.rendering.prompt_pieces import PromptPieces
from quire.rendering.renderer import Prompt, RenderedPrompt, Renderer, RendersChats
from quire.rendering.request import PromptAdapters, RequestRenderer, truncated
from quire.rendering.stop import StopDelta, StopMatcher
from quire.rendering.tokenizer import Tokenizer
from quire.rendering.tokenizer_face import TokenizerFace

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
