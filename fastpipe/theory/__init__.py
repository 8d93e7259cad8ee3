"""What is known about schedules before any is simulated.

* `formulas`: bubble and peak memory of the schedules in closed form, each with its range of validity and its source.
* `bounds`: makespans and spans that no order beats, for any costs, placement and memory limit.

Everything here is exact: a result of the simulator that contradicts it is an error in one of the two, and the tests
compare them. A function raises ValueError outside its range instead of extrapolating. The package uses placements,
schedules, programs and costs; it imports neither the generators nor the simulator.

Users import the two modules as `fastpipe.bounds` and `fastpipe.formulas`.
"""

from fastpipe.theory import bounds as bounds
from fastpipe.theory import formulas as formulas
