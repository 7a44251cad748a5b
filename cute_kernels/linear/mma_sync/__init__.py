"""GEMMs of every architecture from sm_80 on."""
