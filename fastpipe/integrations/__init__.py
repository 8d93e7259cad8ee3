"""Adapters of training frameworks, one module each: their loop and configuration, with fastpipe's step.

An adapter is imported by its own name (``fastpipe.integrations.torchtitan``) and imports its framework itself, so that
fastpipe needs none of them. It is on top of everything: it uses what `fastpipe` exports, as a user's script does, and
nothing of fastpipe imports it. docs/integrations.md has the pages.
"""
