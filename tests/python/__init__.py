"""Tests of the Python package: one file for each thing that can be wrong."""
