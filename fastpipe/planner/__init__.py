"""The planner: the best known partition, placement and order for given costs and memory, and how good it is."""

from fastpipe.planner.budget import Memory as Memory
from fastpipe.planner.entry import plan as plan
from fastpipe.planner.layer_costs import LayerCosts as LayerCosts
from fastpipe.planner.result import Candidate as Candidate
from fastpipe.planner.result import Plan as Plan
