"""The public path of `fastpipe.theory.bounds`: times that no order beats."""

from fastpipe.theory.bounds import *  # noqa: F403 - all of its names, under the path that users import
