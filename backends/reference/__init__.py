"""The reference backend: torch on the CPU."""
