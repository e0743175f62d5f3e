"""Answers as objects, with the openai SDK against a running server.

    quire serve &
    python examples/structured_output.py [--url http://127.0.0.1:8000/v1]

`City` is the form of the answers, a class of pydantic.
"""

from __future__ import annotations

import argparse
from typing import Literal

import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    """An answer. The server draws only tokens that lead to one."""

    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    population: int = Field(ge=0, le=50_000_000)
    is_capital: bool


def ask(client: openai.OpenAI, model: str, question: str) -> City:
    """Ask for an object, and take it as one."""
    completion = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": question}],
        response_format=City,
        max_completion_tokens=200,
    )
    city = completion.choices[0].message.parsed
    if city is None:
        raise ValueError(f"no object: {completion.choices[0]}")
    return city


def stream(client: openai.OpenAI, model: str, question: str) -> tuple[list[str], City]:
    """The same as a stream: the pieces of the text, and the object that they make."""
    with client.chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": question}],
        response_format=City,
        max_completion_tokens=200,
    ) as events:
        pieces = [event.delta for event in events if event.type == "content.delta"]
        city = events.get_final_completion().choices[0].message.parsed
    if city is None:
        raise ValueError("the stream made no object")
    return pieces, city


def choose(client: openai.OpenAI, model: str, text: str, labels: list[str]) -> str:
    """One of some labels: `structured_outputs` takes more than JSON."""
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Of what kind is this: {text}"}],
        extra_body={"structured_outputs": {"choice": labels}},
    )
    return completion.choices[0].message.content or ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Ask a server for answers as objects.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    options = parser.parse_args(arguments)
    with openai.OpenAI(base_url=options.url, api_key="none") as client:
        model = client.models.list().data[0].id
        print(ask(client, model, "Describe the city of Nairobi."))
        pieces, city = stream(client, model, "Describe the city of Lima.")
        print(len(pieces), "pieces:", city)
        print(choose(client, model, "My parcel has not come.", ["complaint", "praise", "question"]))


if __name__ == "__main__":
    main()
