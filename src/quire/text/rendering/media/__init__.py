"""Media of prompts: from what a request brings to token ids, and to what the engine encodes.

`door.py` is what the rest of the front knows of them; `prompt_embeds` and images are its members.
Pillow is imported when the first image comes.
"""

__all__: list[str] = []
