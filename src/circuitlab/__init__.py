"""circuitlab: which edges between a language model's components carry a behaviour."""
