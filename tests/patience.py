"""How long tests wait for what should end at all."""

# After so many seconds what should have ended is taken to hang. It is no measure of speed: on a machine that is ten
# times slower for a while tests pass all the same. pytest ends a test after twice as long (pyproject.toml).
PATIENCE = 300.0
