"""Draft heads: small models that read the states of another one and guess its next tokens."""

from quire.compute.models.heads.eagle import load_eagle
from quire.compute.models.heads.medusa import MedusaHeads, load_medusa
from quire.compute.models.heads.mtp import load_mtp, stored_layers

__all__ = ["MedusaHeads", "load_eagle", "load_medusa", "load_mtp", "stored_layers"]
