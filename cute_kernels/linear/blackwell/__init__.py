"""GEMMs with tcgen05."""
