"""Ops of the linear layers."""
