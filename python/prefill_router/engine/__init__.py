"""The engine: everything that touches torch and transformers.

The Rust crate embeds this package whole and imports it under a private name, so nothing in here may import from the
rest of `prefill_router` (rule 2 of docs/architecture.md). The class that Rust drives is
`transformers_forward.TransformersForward`.
"""
