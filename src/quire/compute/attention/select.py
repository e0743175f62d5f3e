"""Choose the attention backend of each layer group, and say why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from quire.base.errors import ConfigError
from quire.base.platform import Platform
from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.flash_attn3 import FlashAttention3Candidate
from quire.compute.attention.flashinfer import FlashInferCandidate
from quire.compute.attention.kernels import KernelAttention
from quire.compute.attention.needs import AttentionNeeds
from quire.compute.attention.reference import ReferenceAttention
from quire.compute.attention.splittable import SplittableAttention
from quire.config.kv_layout import KVLayout
from quire.ops.attention.paged_attention import OP, WIDTHS
from quire.ops.native.cpu_provider import CACHE_DTYPE_CODES, DTYPE_CODES
from quire.ops.native.team import ALONE, Team
from quire.ops.operation import FOR_CPUS, FOR_GPUS, Provider

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "Candidate",
    "GroupBackends",
    "backend_of_isa",
    "select_backend",
    "select_backends",
]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend, and a sentence for the start-up report."""

    backend: AttentionBackend
    reason: str


@dataclass(frozen=True, slots=True)
class GroupBackends:
    """The backend of each layer group, and a sentence for the start-up report. by_torch: True if
    torch computes the attention of some layers."""

    backends: tuple[AttentionBackend, ...]
    reason: str
    by_torch: bool = False

    def by_layer(self, layout: KVLayout) -> dict[int, AttentionBackend]:
        """The backend of each layer of the layout that has these groups."""
        return {
            layer: backend
            for group, backend in zip(layout.groups, self.backends, strict=True)
            for layer in group.layers
        }

    def splittable(self) -> GroupBackends:
        """The same, each behind a `SplittableAttention`; groups that share one still do."""
        split = {id(each): SplittableAttention(each) for each in self.backends}
        return replace(self, backends=tuple(split[id(each)] for each in self.backends))


class Candidate(Protocol):
    """A backend that may or may not serve."""

    def refusal(self, platform: Platform, needs: AttentionNeeds) -> str | None:
        """Why it cannot serve, or None when it can."""
        ...

    def make(self, team: Team) -> AttentionBackend:
        """The backend; called only after `refusal` gave None."""
        ...


class _Reference:
    def refusal(self, platform: Platform, needs: AttentionNeeds) -> None:
        """It serves everything."""

    def make(self, team: Team) -> AttentionBackend:  # noqa: ARG002  the protocol's
        return ReferenceAttention()


@dataclass(frozen=True, slots=True)
class _Kernels:
    provider: Provider
    device_type: str | None = None
    max_head_dim: int | None = None

    def refusal(self, platform: Platform, needs: AttentionNeeds) -> str | None:
        if needs.dtype not in DTYPE_CODES:
            return needs.refused_dtype()
        if needs.cache_dtype not in CACHE_DTYPE_CODES:
            return needs.refused_cache()
        if self.max_head_dim is not None and needs.head_dim > self.max_head_dim:
            return needs.refused_heads(f"at most {self.max_head_dim}")
        if lacking := needs.scores & self.provider.lacks:
            return needs.refused_scores(lacking)
        if needs.value_dim is not None and WIDTHS in self.provider.lacks:
            return needs.refused_widths()
        if needs.last_key and "last_key" in self.provider.lacks:
            return needs.refused_last_key()
        return self.provider.unavailable(platform)

    def make(self, team: Team) -> AttentionBackend:
        return KernelAttention(
            self.provider.name,
            self.provider.load(team),
            self.device_type,
            adds_biases=self.provider.lacks.isdisjoint(("key_bias", "value_bias")),
        )


def _kernels(provider: Provider) -> _Kernels:
    if provider.name == "triton":
        return _Kernels(provider, max_head_dim=_MAX_TRITON_HEAD_DIM)
    return _Kernels(provider, device_type="cpu")


_MAX_TRITON_HEAD_DIM = 256

# Best first. Those of our kernels have the names of the providers they run.
BACKENDS: Mapping[str, Candidate] = MappingProxyType(
    {
        "fa3": FlashAttention3Candidate(),
        **{provider.name: _kernels(provider) for provider in OP.providers},
        "flashinfer": FlashInferCandidate(),
        "reference": _Reference(),
    }
)


def backend_of_isa(isa: str | None) -> str | None:
    """`forced` of `select_backend` for an instruction set (`none` for plain torch)."""
    return "reference" if isa == "none" else f"cpu_{isa}" if isa else None


def select_backend(
    platform: Platform,
    needs: AttentionNeeds,
    forced: str | None = None,
    team: Team = ALONE,
    *,
    preferred: str | None = None,
) -> BackendChoice:
    """The best backend that can serve `needs` here, or the forced one; `team` computes. preferred:
    the best, if it can serve.

    Raises ConfigError when the forced backend does not exist or cannot serve.
    """
    if forced is not None and forced not in BACKENDS:
        raise ConfigError(
            f"No such attention backend: {forced!r}. Use one of: {', '.join(BACKENDS)}."
        )
    refused: dict[str, list[str]] = {}
    first = () if preferred is None else (preferred,)
    for name in (forced,) if forced else dict.fromkeys((*first, *BACKENDS)):
        refusal = BACKENDS[name].refusal(platform, needs)
        if refusal is None:
            why = "asked for" if forced else "; ".join(["best that serves here", *_told(refused)])
            return BackendChoice(BACKENDS[name].make(team), f"attention: {name} ({why})")
        refused.setdefault(refusal, []).append(name)
    raise ConfigError(
        f"Attention backend {forced!r} cannot serve here: {'; '.join(refused)}. "
        "Force another backend, or none."
    )


def select_backends(
    platform: Platform,
    needs: Sequence[AttentionNeeds],
    layers: Sequence[Sequence[int]],
    forced: str | None = None,
    team: Team = ALONE,
    *,
    preferred: str | None = None,
) -> GroupBackends:
    """Call `select_backend` for each layer group; groups that need the same share a backend.
    layers: layers of each group, for the sentence. A forced backend has to serve all groups that
    have layers."""
    if not any(layers):
        return GroupBackends((ReferenceAttention(),) * len(needs), "attention: none")
    choices = {
        each: select_backend(platform, each, forced, team, preferred=preferred)
        for each in dict.fromkeys(needs)
    }
    served: dict[str, list[int]] = {}
    for each, members in zip(needs, layers, strict=True):
        served.setdefault(choices[each].reason, []).extend(members)
    if len(served) == 1:
        reason = next(iter(served))
    else:
        reason = "; ".join(
            f"{reason} for layers {', '.join(map(str, sorted(members)))}"
            for reason, members in served.items()
        )
    by_torch = any(
        isinstance(choices[each].backend, ReferenceAttention)
        for each, members in zip(needs, layers, strict=True)
        if members
    )
    return GroupBackends(tuple(choices[each].backend for each in needs), reason, by_torch)


def _told(refused: Mapping[str, list[str]]) -> list[str]:
    """Each reason once, behind the names of the backends that it keeps away; none for those
    that are for other devices."""
    return [
        f"{', '.join(names)} cannot serve: {reason}"
        for reason, names in refused.items()
        if reason not in (FOR_CPUS, FOR_GPUS)
    ]
