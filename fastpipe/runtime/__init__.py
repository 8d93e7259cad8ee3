"""Everything that runs a Program: stages, executors, transports. The only part of fastpipe that imports torch."""
