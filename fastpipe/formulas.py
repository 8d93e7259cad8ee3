"""The public path of `fastpipe.theory.formulas`: bubbles and peaks of the schedules in closed form."""

from fastpipe.theory.formulas import *  # noqa: F403 - all of its names, under the path that users import
