"""The planner: the best known partition, placement and order for given costs and memory, and how good it is.

`plan` promises a schedule that is proved, fits into the memory, and is no worse than any schedule of the registry that
fits; its times are those that `fastpipe.simulate` gives; the same seed gives the same plan, unless a time limit cuts
the search. The modules, each of which imports only those before it:

* `layer_costs`, `problem`: what is planned for, and what no order of it beats;
* `tasks`: the columns that Python and csrc/plan order;
* `engine`: times, list scheduling and annealing of tasks, native or in Python;
* `result`: `Plan` and its `Candidate` rows;
* `candidates`: the registry's schedules for these costs;
* `search`: orders made from nothing, annealing, moves of layers;
* `exact`: proofs and windows by OR-Tools;
* `planner`: `plan` itself.

It composes the core, `fastpipe.schedules` and `fastpipe.theory`.
"""

from fastpipe.planner.layer_costs import LayerCosts as LayerCosts
from fastpipe.planner.planner import plan as plan
from fastpipe.planner.problem import Memory as Memory
from fastpipe.planner.problem import read_costs as read_costs
from fastpipe.planner.result import Candidate as Candidate
from fastpipe.planner.result import Plan as Plan
