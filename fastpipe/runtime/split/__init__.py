"""Splitting a model into layers for a Pipeline, whatever it is written in."""
